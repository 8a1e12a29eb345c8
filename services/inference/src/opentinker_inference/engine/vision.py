"""Images of a prompt in the deterministic engine: vectors at their places, and positions that count them.

The cache holds a token at its place in the sequence; what the rotary embedding turns by is its position,
which an image advances by less than the places it takes.
"""

from collections.abc import Sequence
from typing import Any

import torch

from opentinker_inference.domain.images import Images
from opentinker_kit.images import Grid, position_ids
from opentinker_kit.vision import ImageVectors, VisionTower
from opentinkerapi.runtime.images import ImageSettings


class PromptVision:
    """The image side of a model."""

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings
        self._tower = VisionTower(settings)

    def inputs(self, model: Any, chunk: Sequence[int], start: int, images: Images) -> dict[str, torch.Tensor]:
        """What the decoder is called with for a chunk of a prompt that begins at `start`."""
        end = start + len(chunk)
        found = [self._vectors(model, image) for image in images]
        embeddings = model.get_input_embeddings()(torch.tensor([chunk]))
        for image, each in zip(images, found, strict=True):
            first, last = max(start, image.start), min(end, image.start + image.token_count)
            if first < last:
                part = each.vectors[first - image.start : last - image.start]
                embeddings[0, first - start : last - start] = part.to(embeddings.dtype)
        # An image may go on in the next chunk.
        length = max(end, *(image.start + image.token_count for image in images))
        positions = position_ids(length, _grids(images, found))[:, start:end]
        return {"inputs_embeds": embeddings, "position_ids": torch.from_numpy(positions)[:, None]}

    def shift(self, model: Any, length: int, images: Images) -> int:
        """Position minus place of what follows a prompt of that length."""
        if not images:
            return 0
        grids = _grids(images, [self._vectors(model, image) for image in images])
        return int(position_ids(length + 1, grids)[0, length]) - length

    def _vectors(self, model: Any, image: Any) -> ImageVectors:
        return self._tower.vectors(model, image.data, image.token_count)


def _grids(images: Images, found: Sequence[ImageVectors]) -> list[Grid]:
    pairs = zip(images, found, strict=True)
    return [Grid(image.start, each.rows, each.columns) for image, each in pairs]
