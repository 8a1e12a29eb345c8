"""Images on their way into a vision-language model.

The vision tower is frozen whatever is trained: its vectors depend on the image alone. So each image goes
through it by itself, once, and a micro-batch only puts vectors where the placeholders are; neither the cut
into micro-batches nor what else is in them can show. A row with an image holds one sample and shares nothing.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from opentinker_kit.errors import ServiceError
from opentinker_kit.images import Grid, patches, position_ids
from opentinker_kit.models import tokenizer_files
from opentinker_trainer.domain.images import SampleImage
from opentinker_trainer.domain.plan import Layout
from opentinkerapi.runtime.images import ImageError, ImageSettings
from opentinkerapi.runtime.reasons import Reason

TOWER = "visual"
"""Name of the tower within the model; no parameter under it is ever trained."""
TOWER_MODULES = rf"(.*\.)?{TOWER}\..*"
"""Matches the names of its modules: what peft must leave out, where leaf names repeat."""
_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ImageVectors:
    """What the tower makes of an image."""

    vectors: Tensor
    """[rows * columns, H], without gradient."""
    rows: int
    columns: int
    """Places down and across."""


def image_settings(path: Path) -> ImageSettings | None:
    """What the model in a directory does with images. ServiceError UNSUPPORTED_OPTION."""
    try:
        return ImageSettings.of_files(tokenizer_files(path))
    except ImageError as error:
        raise ServiceError(Reason.UNSUPPORTED_OPTION, f"{path}: {error}", field="base_model") from error


def model_class(path: Path) -> Any:
    """Which of transformers' classes loads the model in a directory."""
    if image_settings(path) is None:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def in_tower(name: str) -> bool:
    """Whether a module or parameter belongs to the vision tower."""
    return TOWER in name.split(".")


class Vision:
    """The image side of one loaded model."""

    def __init__(self, model: Any, settings: ImageSettings) -> None:
        self.settings = settings
        self._model = model
        self._known: OrderedDict[bytes, ImageVectors] = OrderedDict()

    def image(self, image: SampleImage) -> ImageVectors:
        """The vectors of an image. ServiceError INVALID_SAMPLE if it cannot be decoded."""
        key = hashlib.sha256(image.data).digest()
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._compute(image)
            while len(self._known) > 1 and sum(_size(each) for each in self._known.values()) > _CACHE_BYTES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known

    @contextmanager
    def placed(self, cut: Layout, decoder: Any) -> Iterator[Tensor]:
        """Within, the decoder's embedding layer gives the images' vectors at their places.

        Yields the position ids [3, B, L] that go with them. ServiceError INVALID_SAMPLE.

        A hook, and not embeddings made outside, so that whatever wraps the decoder (FSDP) does its part.
        """
        found = {place.image: self.image(place.image) for place in cut.images}

        def place(_module: Any, _inputs: Any, embeddings: Tensor) -> Tensor:
            for each in cut.images:
                vectors = found[each.image].vectors
                places = slice(each.column, each.column + vectors.shape[0])
                embeddings[each.row, places] = vectors.to(embeddings.device, embeddings.dtype)
            return embeddings

        positions = np.repeat(cut.position_ids[None], 3, axis=0)
        for row in {each.row for each in cut.images}:
            mine = [(each.column, found[each.image]) for each in cut.images if each.row == row]
            grids = [Grid(column, image.rows, image.columns) for column, image in mine]
            positions[:, row] = position_ids(positions.shape[2], grids)
        handle = decoder.get_input_embeddings().register_forward_hook(place)
        try:
            yield torch.from_numpy(positions)
        finally:
            handle.remove()

    def _compute(self, image: SampleImage) -> ImageVectors:
        try:
            given = patches(image.data, self.settings)
        except ImageError as error:  # the front has looked at it before
            raise ServiceError(Reason.INVALID_SAMPLE, f"an image cannot be used: {error}") from error
        merge = self.settings.merge_size
        grid = torch.tensor([[1, given.rows, given.columns]])
        with torch.no_grad():
            tower = self._model.base_model.visual
            pixels = torch.from_numpy(given.values).to(tower.dtype)
            vectors = tower(pixels, grid_thw=grid).pooler_output
        if vectors.shape[0] != image.token_count:
            text = f"an image takes {vectors.shape[0]} places, not {image.token_count}"
            raise ServiceError(Reason.INVALID_SAMPLE, text)
        return ImageVectors(vectors, given.rows // merge, given.columns // merge)


def _size(vectors: ImageVectors) -> int:
    return vectors.vectors.numel() * vectors.vectors.element_size()
