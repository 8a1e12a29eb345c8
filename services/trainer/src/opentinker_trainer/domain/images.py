"""Images in train samples: where they stand among the tokens, and what makes one acceptable.

An image takes `token_count` places, which follow from its size. They hold the model's placeholder id, are
never trained on, and get their vectors from the vision tower. The same id outside an image is a token like
any other: a policy can sample it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opentinker_kit.images import decode
from opentinkerapi.runtime.images import ImageError, ImageSettings, media_type


@dataclass(frozen=True, slots=True)
class SampleImage:
    """One image of a sample."""

    chunk: int
    """Which of the sample's chunks it is."""
    start: int
    """Its first place."""
    token_count: int
    data: bytes
    """The encoded image."""
    media_type: str


class ImageCheck:
    """Checks the images of one request; an image that several samples hold is decoded once."""

    def __init__(self, settings: ImageSettings | None) -> None:
        self._settings = settings
        self._counts: dict[bytes, int | ImageError] = {}

    def problem(self, images: Sequence[SampleImage], loss_mask: NDArray[np.bool_]) -> tuple[str, str] | None:
        """Field and text of the first thing that is wrong, None if all is well. The mask fits the tokens."""
        for image in images:
            field = f"chunks[{image.chunk}].image"
            found = media_type(image.data)
            if found and found != image.media_type:
                return f"{field}.image.media_type", f"is {image.media_type!r} and the bytes are {found}"
            count = self._count(image.data)
            if isinstance(count, ImageError):
                return f"{field}.image", str(count)
            if count != image.token_count:
                text = f"is {image.token_count}; an image of this size takes {count} places"
                return f"{field}.token_count", text
            places = slice(image.start, image.start + count)
            if loss_mask[places].any():
                at = image.start + int(np.argmax(loss_mask[places]))
                return "loss_mask", f"loss_mask[{at}] is 1 at a place of the image in chunk {image.chunk}"
        return None

    def _count(self, data: bytes) -> int | ImageError:
        if data not in self._counts:
            assert self._settings is not None, "images are refused where there are no settings"
            try:
                self._counts[data] = self._settings.token_count(*decode(data).size)
            except ImageError as error:
                self._counts[data] = error
        return self._counts[data]
