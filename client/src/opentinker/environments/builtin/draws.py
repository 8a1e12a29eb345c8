"""Draws that are a pure function of a seed, equal on every Python version and machine."""

import hashlib


def draw(seed: int, purpose: str, size: int) -> int:
    """A number in [0, size), uniform to within size / 2**64."""
    digest = hashlib.sha256(f"{purpose}:{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") * size >> 64
