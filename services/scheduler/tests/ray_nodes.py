"""A Ray cluster of several nodes on this machine, for tests."""

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

TESTS = Path(__file__).parent


class RayNodes:
    """A head without room and nodes with it. What they start imports the modules of this folder."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self.nodes: list[Any] = []
        self._added = 0

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, cpus: int = 4, gpus: int = 0) -> Any:
        # Each with an address of its own: a scheduler here is then on the head, which is never lost.
        self._added += 1
        address = f"127.0.0.{self._added + 1}"
        node = self._cluster.add_node(num_cpus=cpus, num_gpus=gpus, node_ip_address=address)
        self.nodes.append(node)
        return node

    def lose(self, node: Any) -> None:
        """Take a node away without a word to anyone: its processes are killed."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def node_of(self, pid: int) -> Any:
        """The node that a process is on."""
        raylets = {
            info.process.pid: node
            for node in self.nodes
            for infos in node.all_processes.values()
            for info in infos
        }
        for parent in (psutil.Process(pid), *psutil.Process(pid).parents()):
            if parent.pid in raylets:
                return raylets[parent.pid]
        raise LookupError(f"process {pid} is on no node")

    def reserved(self) -> list[str]:
        """Names of what is reserved, by whomever."""
        import ray

        ray.init(self.address, namespace="tests", log_to_driver=False, logging_level=logging.WARNING)
        try:
            table = ray.util.placement_group_table()
            return [str(one["name"]) for one in table.values() if one["state"] != "REMOVED"]
        finally:
            ray.shutdown()

    def shutdown(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()
        # Finalizers that run while Python 3.11 parses something make that fail (SystemError).
        gc.collect()


@contextmanager
def ray_nodes(*nodes: tuple[int, int]) -> Iterator[RayNodes]:
    """A cluster with nodes of so many CPUs and GPUs each."""
    # Asked once, so that this process keeps the one that it has.
    tempfile.gettempdir()
    # Short, because Ray's sockets are below it.
    folder = tempfile.mkdtemp(prefix="otr-", dir="/tmp")
    python_path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    # What a node's processes see is what this process has when the node starts.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path)
        patch.setenv("TMPDIR", folder)
        cluster = RayNodes()
        try:
            for cpus, gpus in nodes:
                cluster.add(cpus, gpus)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
