"""Ragged rows of numbers, one a token, beside masks that say which tokens are trained on."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from opentinker.errors import invalid

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

Row = Sequence[float] | NDArray[np.floating]
"""[T], entry t belongs to token t."""

Mask = Sequence[int] | NDArray[np.integer] | NDArray[np.bool_]
"""[T] of 0 and 1."""


def paired(rows: Sequence[Row], masks: Sequence[Mask], field: str) -> list[tuple[Floats, NDArray[np.bool_]]]:
    """Rows and masks as arrays, of one shape each; what is not finite at mask 0 becomes 0.

    InvalidArgument, naming the row, on other shapes, masks of anything but 0 and 1, and NaN or inf at mask 1.
    """
    if len(rows) != len(masks):
        raise invalid("masks", f"{len(masks)} masks for {len(rows)} rows of {field}")
    result = []
    for index, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        values = np.asarray(row, dtype=np.float64)
        flags = np.asarray(mask)
        if values.ndim != 1 or values.shape != flags.shape:
            raise invalid(f"{field}[{index}]", f"shape {values.shape} for a mask of shape {flags.shape}")
        if not ((flags == 0) | (flags == 1)).all():
            raise invalid(f"masks[{index}]", "must be 0 or 1")
        kept = flags.astype(bool)
        if not np.isfinite(values[kept]).all():
            raise invalid(f"{field}[{index}]", "is not finite at a token with mask 1")
        # What stands on gaps may be anything; it must not reach a sum by way of nan * 0.
        result.append((np.where(np.isfinite(values), values, 0.0), kept))
    return result
