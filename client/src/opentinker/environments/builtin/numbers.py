"""Numbers in what a model says."""

MAX_DIGITS = 18
"""More is no answer to anything asked here; Python refuses to read more than some thousands."""


def integer(digits: str) -> int | None:
    """The integer that these digits, with or without a sign, are; None for one of absurd length."""
    return int(digits) if len(digits) <= MAX_DIGITS + 1 else None
