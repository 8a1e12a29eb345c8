"""A distribution in three numbers, as metrics show it."""

from collections.abc import Iterable

import numpy as np


def spread(name: str, values: Iterable[float]) -> dict[str, float]:
    """mean, max and min; nothing where there is nothing."""
    array = np.asarray(list(values), dtype=np.float64)
    if not array.size:
        return {}
    return {
        f"{name}/mean": float(array.mean()),
        f"{name}/max": float(array.max()),
        f"{name}/min": float(array.min()),
    }
