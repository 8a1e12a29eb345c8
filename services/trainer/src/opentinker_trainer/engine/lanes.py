"""Threads that run micro-batches side by side, each with its share of the cores.

Two threads that compute a micro-batch each wait for one another once a micro-batch; two that share every
operation wait after each of them, and one is idle wherever an operation is too small to be shared. How many
threads compute a result decides its last bits: a lane always has the same number.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

ResultT = TypeVar("ResultT")


class Lanes:
    """`count` threads of which each computes with `threads // count` threads."""

    def __init__(self, count: int, threads: int) -> None:
        """The thread that makes them keeps `threads` threads of its own."""
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        torch.set_num_threads(threads)
        if count == 1:
            return
        started = threading.Barrier(count)

        def start() -> None:
            # A thread takes the process's number when it first asks; only after that it keeps its own.
            torch.get_num_threads()
            torch.set_num_threads(max(1, threads // count))
            started.wait()

        self._pool = ThreadPoolExecutor(count, thread_name_prefix="lane", initializer=start)
        for future in [self._pool.submit(int) for _ in range(count)]:
            future.result()
        # The process's number again, for this thread and those that torch has not met yet.
        torch.set_num_threads(threads)

    def run(self, works: Sequence[Callable[[], ResultT]]) -> list[ResultT]:
        """Their results in order; a single one runs here, with all threads.

        All have ended when it returns or raises; of several errors the first in order is raised.
        """
        if self._pool is None or len(works) == 1:
            return [work() for work in works]
        futures: list[Future[ResultT]] = [self._pool.submit(work) for work in works]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]
