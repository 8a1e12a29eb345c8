"""Names and seeds as pure functions of what is done, never of when.

A request that is sent again after a crash has the same name, so that finished work is not done twice, and the
same seed, so that unfinished work comes out the same.
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentinker.environments.content import Message

_MARK = "\x1f"

SEED_BITS = 48
"""Seeds stay exact in every language's numbers (JSON, JavaScript), with room for seed + i."""


def digest(*parts: object) -> bytes:
    """32 bytes that depend on every part and on their order and types."""
    text = _MARK.join(f"{type(part).__name__}:{part}" for part in parts)
    return hashlib.sha256(text.encode()).digest()


def seed(*parts: object) -> int:
    """A seed in [0, 2**48)."""
    return int.from_bytes(digest("seed", *parts)[:8], "big") >> (64 - SEED_BITS)


def request_id(kind: str, *parts: object) -> str:
    """An idempotency key."""
    return f"{kind}-{digest('request', kind, *parts).hex()[:32]}"


def conversation(messages: Sequence["Message"]) -> str:
    """Name of a chat by how it begins: up to its user's first message, which every later turn repeats."""
    first = next((index for index, message in enumerate(messages) if message.role == "user"), 0)
    return request_id("chat", *map(repr, messages[: first + 1]))
