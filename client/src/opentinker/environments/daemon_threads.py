"""Threads for code that may never return.

Those of `concurrent.futures` are joined when the interpreter ends, so a user's endless loop would keep the
process alive for ever. These are daemons, and one that hangs is simply not reused.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_MAX_IDLE = 32


class DaemonThreads:
    """Runs each call in a thread of its own, reusing threads that are idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def submit(self, call: Callable[[], Any]) -> "Future[Any]":
        """Start `call` at once; its outcome arrives in the future."""
        future: Future[Any] = Future()
        with self._lock:
            worker = self._idle.pop() if self._idle else _Worker(self)
        worker.inbox.put((call, future))
        return future

    def _rest(self, worker: "_Worker") -> bool:
        with self._lock:
            if len(self._idle) >= _MAX_IDLE:
                return False
            self._idle.append(worker)
            return True


class _Worker:
    def __init__(self, owner: DaemonThreads) -> None:
        self.inbox: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._owner = owner
        threading.Thread(target=self._run, name="environment", daemon=True).start()

    def _run(self) -> None:
        while True:
            call, future = self.inbox.get()
            if future.set_running_or_notify_cancel():
                try:
                    outcome = call()
                except Exception as error:
                    future.set_exception(error)
                except BaseException as error:
                    # Whoever waits on an event loop would end the whole process with a SystemExit.
                    gone = RuntimeError(f"{type(error).__name__}: {error}")
                    gone.__cause__ = error
                    future.set_exception(gone)
                else:
                    future.set_result(outcome)
                    del outcome
            del call, future
            if not self._owner._rest(self):
                return
