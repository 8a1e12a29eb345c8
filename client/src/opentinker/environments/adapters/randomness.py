"""The process-global generators of `random` and numpy, as one episode sees them.

For libraries that draw from them: each episode has states of its own, which are in place while its code runs
and nowhere else. So episodes may be interleaved, and neither disturb the process nor depend on it. Such code
runs one call at a time in a process.
"""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOCK = threading.RLock()


def library_seed(seed: int) -> int:
    """A seed that every library takes: below 2**31."""
    return seed % 2**31


class OwnRandomness:
    """The generators of an episode."""

    def __init__(self, seed: int) -> None:
        self._seed = library_seed(seed)
        self._states: list[Any] = [random.Random(self._seed).getstate(), None]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While the episode's code runs."""
        with _LOCK:
            # A library that draws from numpy has imported it.
            numpy = sys.modules.get("numpy")
            before, numpy_before = random.getstate(), numpy.random.get_state() if numpy else None
            random.setstate(self._states[0])
            if numpy:
                if self._states[1] is None:
                    numpy.random.seed(self._seed)
                else:
                    numpy.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = [random.getstate(), numpy.random.get_state() if numpy else None]
                random.setstate(before)
                if numpy:
                    numpy.random.set_state(numpy_before)
