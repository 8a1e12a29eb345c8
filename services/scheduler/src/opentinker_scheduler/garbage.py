"""How often Python looks for cycles of objects in a scheduler's process.

Each look at all of them stops everything, for 100 ms with 10,000 jobs, and ticks make many objects that live
for a moment. With the numbers that Python begins with that is several times in ten seconds.
"""

import gc

_YOUNG, _MIDDLE, _OLD = 50_000, 20, 100


def collect_seldom() -> None:
    """Look less often; what was imported so far is left out for good. Objects that are in no cycle are freed
    at once as ever."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
