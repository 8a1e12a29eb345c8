"""A Ray cluster of several nodes on this machine, for tests."""

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

TESTS = Path(__file__).parent
TRIES = 3


@dataclass(frozen=True)
class RayNode:
    """A node other than the head."""

    number: int
    node_ip_address: str
    pids: frozenset[int]


class RayNodes:
    """A head without room and nodes with it. What they start imports the modules of this folder."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "ray.log"
        self.nodes: list[RayNode] = []
        self._added = 0
        for attempt in range(TRIES):
            self._program = self._start()
            try:
                self.address = str(self._answer())
                return
            except ChildProcessError:
                if attempt == TRIES - 1:
                    raise

    def _start(self) -> "subprocess.Popen[str]":
        python_path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, str(TESTS / "ray_program.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("ab"),
            # What a node's processes see is what this one has.
            env=os.environ
            | {
                "PYTHONPATH": python_path,
                "RAY_USAGE_STATS_ENABLED": "0",
                # The head of a starved machine may need more than the 30 s that Ray gives it.
                "RAY_gcs_server_port_wait_time_s": "60",
            },
            text=True,
        )

    def _answer(self) -> Any:
        assert self._program.stdout is not None
        line = self._program.stdout.readline()
        if not line:
            code = self._program.wait()
            raise ChildProcessError(f"Ray's nodes ended with {code}:\n{self._log.read_text()[-4000:]}")
        return json.loads(line)

    def _ask(self, *words: Any) -> Any:
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps(words) + "\n")
        self._program.stdin.flush()
        return self._answer()

    def add(self, cpus: int = 4, gpus: int = 0) -> RayNode:
        # Each with an address of its own: a scheduler here is then on the head, which is never lost.
        self._added += 1
        address = f"127.0.0.{self._added + 1}"
        added = self._ask("add", cpus, gpus, address)
        node = RayNode(added["number"], address, frozenset(added["pids"]))
        self.nodes.append(node)
        return node

    def lose(self, node: RayNode) -> None:
        """Take a node away without a word to anyone: its processes are killed."""
        self.nodes.remove(node)
        self._ask("lose", node.number)

    def node_of(self, pid: int) -> RayNode:
        """The node that a process is on."""
        process = psutil.Process(pid)
        above = {pid, *(parent.pid for parent in process.parents())}
        for node in self.nodes:
            if above & node.pids:
                return node
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
        try:
            self._ask("shutdown")
            self._program.wait(60.0)
        finally:
            self._program.kill()
            self._program.wait()
        # Finalizers that run while Python 3.11 parses something make that fail (SystemError).
        gc.collect()


@contextmanager
def ray_nodes(*nodes: tuple[int, int]) -> Iterator[RayNodes]:
    """A cluster with nodes of so many CPUs and GPUs each."""
    # Asked once, so that this process keeps the one that it has.
    tempfile.gettempdir()
    # Short, because Ray's sockets are below it.
    folder = tempfile.mkdtemp(prefix="otr-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        cluster = RayNodes(Path(folder))
        try:
            for cpus, gpus in nodes:
                cluster.add(cpus, gpus)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
