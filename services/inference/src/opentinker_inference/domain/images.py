"""Prompts with images: their places hold the model's placeholder id, and the images say what stands there.

The same id outside an image is a token like any other: a policy can sample it, and it comes back in the next
prompt.
"""

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An encoded image at the places [start, start + token_count)."""

    start: int
    token_count: int
    data: bytes = field(repr=False)
    digest: str = field(init=False, compare=False)
    """SHA-256 of the data: what caches tell images apart by."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.sha256(self.data).hexdigest())


Images = tuple[PromptImage, ...]


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt as engines take it."""

    ids: tuple[int, ...]
    images: Images = ()
    """In order."""
