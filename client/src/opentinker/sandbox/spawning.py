"""Starts the programs of jails, from one thread that lives as long as the process.

The kernel tells a jail that its parent died when the *thread* that started it ends, and threads that play
episodes come and go.
"""

import os
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any


def spawn(
    words: Sequence[str], streams: tuple[int, int, int], inherited: Sequence[int]
) -> "subprocess.Popen[bytes]":
    """Start a program with these standard streams, these other descriptors and no variables."""
    global _spawner
    with _lock:
        if _spawner is None or _spawner.pid != os.getpid():
            _spawner = _Spawner()
        spawner = _spawner

    def start() -> "subprocess.Popen[bytes]":
        stdin, stdout, stderr = streams
        return subprocess.Popen(
            words,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=inherited,
            env={},
            cwd="/",
            start_new_session=True,
        )

    process: subprocess.Popen[bytes] = spawner.call(start)
    return process


class _Spawner:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="jails", daemon=True).start()

    def call(self, function: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._inbox.put((function, future))
        return future.result()

    def _run(self) -> None:
        while True:
            function, future = self._inbox.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del function, future


_lock = threading.Lock()
_spawner: _Spawner | None = None
