"""Images on their way into a vision-language model.

A micro-batch puts the vectors of its images where the placeholders are; neither the cut into micro-batches
nor what else is in them can show in them. A row with an image holds one sample and shares nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opentinker_kit.images import Grid, position_ids
from opentinker_kit.vision import TOWER, VisionTower
from opentinker_trainer.domain.plan import Layout
from opentinkerapi.runtime.images import ImageSettings

TOWER_MODULES = rf"(.*\.)?{TOWER}\..*"
"""Matches the names of the tower's modules: what peft must leave out, where leaf names repeat."""


class Vision:
    """The image side of one loaded model."""

    def __init__(self, model: Any, settings: ImageSettings) -> None:
        self.settings = settings
        self._model = model
        self._tower = VisionTower(settings)

    @contextmanager
    def placed(self, cut: Layout, decoder: Any) -> Iterator[Tensor]:
        """Within, the decoder's embedding layer gives the images' vectors at their places.

        Yields the position ids [3, B, L] that go with them. A hook, and not embeddings made outside, so that
        whatever wraps the decoder (FSDP) does its part.
        """
        found = [
            (each, self._tower.vectors(self._model, each.image.data, each.image.token_count))
            for each in cut.images
        ]

        def place(_module: Any, _inputs: Any, embeddings: Tensor) -> Tensor:
            for each, image in found:
                places = slice(each.column, each.column + each.image.token_count)
                embeddings[each.row, places] = image.vectors.to(embeddings.device, embeddings.dtype)
            return embeddings

        positions = np.repeat(cut.position_ids[None], 3, axis=0)
        for row in {each.row for each in cut.images}:
            grids = [Grid(each.column, i.rows, i.columns) for each, i in found if each.row == row]
            positions[:, row] = position_ids(positions.shape[2], grids)
        handle = decoder.get_input_embeddings().register_forward_hook(place)
        try:
            yield torch.from_numpy(positions)
        finally:
            handle.remove()
