"""Holds the nodes of a Ray cluster and does what lines of JSON on its input ask for.

A process of its own, with one thread: Ray forks to start what a node consists of and runs Python in the
fork, which can stand still for ever where the process has threads inside of gRPC, as a test's has.
"""

import json
import sys
from typing import Any


class Program:
    """A head without room, and the nodes that were added to it, by number."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self._nodes: list[Any] = []

    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, cpus: int, gpus: int, address: str) -> dict[str, Any]:
        node = self._cluster.add_node(num_cpus=cpus, num_gpus=gpus, node_ip_address=address)
        self._nodes.append(node)
        pids = [info.process.pid for infos in node.all_processes.values() for info in infos]
        return {"number": len(self._nodes) - 1, "pids": pids}

    def lose(self, number: int) -> None:
        self._cluster.remove_node(self._nodes[number], allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()


def main() -> None:
    # What Ray prints must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    program = Program()
    print(json.dumps(program.address()), file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(program, name)(*arguments)), file=answers, flush=True)
        if name == "shutdown":
            return


if __name__ == "__main__":
    main()
