"""Checks of numeric options, each refusing by name and saying what is allowed."""

import math

from opentinker.errors import invalid


def at_least(name: str, value: float, bound: float) -> None:
    """Finite and not below the bound."""
    if not (math.isfinite(value) and value >= bound):
        raise invalid(name, f"must be a finite number of at least {bound:g}, not {value}")


def above(name: str, value: float, bound: float) -> None:
    """Finite and above the bound."""
    if not (math.isfinite(value) and value > bound):
        raise invalid(name, f"must be a finite number above {bound:g}, not {value}")


def within(name: str, value: float, low: float, high: float) -> None:
    """low <= value < high."""
    if not low <= value < high:
        raise invalid(name, f"must be in [{low:g}, {high:g}), not {value}")


def ordered(low_name: str, low: float, high_name: str, high: float) -> None:
    """0 <= low <= high, both finite."""
    at_least(low_name, low, 0.0)
    at_least(high_name, high, 0.0)
    if low > high:
        raise invalid(low_name, f"must not be above {high_name}: {low} > {high}")
