"""The vision tower of a model, for the engines. (Needs the extras `images` and `models`.)

The tower is frozen whatever is trained, so what it makes of an image depends on the image alone. Each image
goes through it by itself, once: neither batching nor what else is in a batch can show in its vectors.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from opentinker_kit.errors import ServiceError
from opentinker_kit.images import patches
from opentinkerapi.runtime.images import ImageError, ImageSettings
from opentinkerapi.runtime.reasons import Reason

TOWER = "visual"
"""Name of the tower within the model."""
_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ImageVectors:
    """What the tower makes of an image."""

    vectors: Tensor
    """[rows * columns, H], without gradient."""
    rows: int
    columns: int
    """Places down and across."""


def model_class(settings: ImageSettings | None) -> Any:
    """Which of transformers' classes loads the model."""
    if settings is None:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def in_tower(name: str) -> bool:
    """Whether a module or parameter belongs to the vision tower."""
    return TOWER in name.split(".")


class VisionTower:
    """Makes and keeps the vectors of images."""

    def __init__(self, settings: ImageSettings, cache_bytes: int = _CACHE_BYTES) -> None:
        self.settings = settings
        self._cache_bytes = cache_bytes
        self._known: OrderedDict[str, ImageVectors] = OrderedDict()

    def vectors(self, model: Any, data: bytes, token_count: int) -> ImageVectors:
        """Those of an encoded image. ServiceError INVALID_FIELD if it is none, or takes other than that many
        places: servers look at an image before an engine sees it.
        """
        key = hashlib.sha256(data).hexdigest()
        if key not in self._known:
            self._known[key] = self._compute(model, data)
            while len(self._known) > 1 and sum(map(_bytes, self._known.values())) > self._cache_bytes:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        found = self._known[key]
        if found.vectors.shape[0] != token_count:
            text = f"an image takes {found.vectors.shape[0]} places, not {token_count}"
            raise ServiceError(Reason.INVALID_FIELD, text)
        return found

    def _compute(self, model: Any, data: bytes) -> ImageVectors:
        try:
            given = patches(data, self.settings)
        except ImageError as error:
            raise ServiceError(Reason.INVALID_FIELD, f"an image cannot be used: {error}") from error
        tower = getattr(model.base_model, TOWER)
        grid = torch.tensor([[1, given.rows, given.columns]])
        with torch.no_grad():
            pixels = torch.from_numpy(given.values).to(tower.device, tower.dtype)
            vectors = tower(pixels, grid_thw=grid.to(tower.device)).pooler_output
        merge = self.settings.merge_size
        return ImageVectors(vectors, given.rows // merge, given.columns // merge)


def _bytes(vectors: ImageVectors) -> int:
    return vectors.vectors.numel() * vectors.vectors.element_size()
