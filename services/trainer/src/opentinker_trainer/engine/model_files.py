"""Whole models in Hugging Face layout: weights, configuration, and what lies beside them."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opentinker_kit.errors import ServiceError
from opentinker_trainer.engine.adapter_files import check_shapes
from opentinker_trainer.engine.tensor_files import Shape, TensorFiles, Writer
from opentinkerapi.runtime.reasons import Reason

STEM = "model"
CONFIG = "config.json"
BESIDE = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)
"""Files that are copied as they are, so that an exported folder is whole."""
_DTYPE_KEYS = ("dtype", "torch_dtype")
_OTHERWISE = (("model.language_model.", "model."), ("model.visual.", "visual."))
"""How names of a vision-language model begin in memory, and in files."""


class ModelFiles:
    """Writes and reads weights of one base model's shape."""

    def __init__(self, base: Path, tied: tuple[str, ...]) -> None:
        """`base`: the base model's folder. `tied`: names that stand for weights of another name."""
        self._base = base
        self._tied = tied
        self._stored = TensorFiles(base, STEM).shapes
        self._otherwise = _OTHERWISE if any(name.startswith("visual.") for name in self._stored) else ()

    def check(self, names: Mapping[str, Any]) -> None:
        """ServiceError UNSUPPORTED_OPTION if the base's files have other weights than the model."""
        stored = {self._live(name): shape for name, shape in self._stored.items()}
        wrong = sorted((stored.keys() ^ names.keys()) - set(self._tied)) if stored else []
        if wrong:
            text = f"{wrong[0]} is not in both the model and its files; its weights cannot be exported"
            raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="tuning.full")

    def save(
        self,
        writer: Writer,
        shapes: Mapping[str, Shape],
        get: Callable[[str], Tensor | None],
        dtype: Callable[[str], torch.dtype],
    ) -> None:
        """Write a model. `get` and `dtype` as for `Writer.write_tensors`."""
        live = {self._filed(name): name for name in shapes}
        writer.write_tensors(
            STEM,
            {filed: shapes[name] for filed, name in live.items()},
            lambda filed: get(live[filed]),
            lambda filed: dtype(live[filed]),
        )
        widest = max((dtype(name) for name in shapes), key=lambda kind: kind.itemsize)
        config = json.loads((self._base / CONFIG).read_text())
        _set_dtype(config, str(widest).removeprefix("torch."))
        writer.write_json(CONFIG, config)
        for name in BESIDE:
            if (self._base / name).is_file():
                writer.write(name, partial(shutil.copyfile, self._base / name))

    def load(
        self, directory: Path, shapes: Mapping[str, Shape], part: Callable[[str, Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """What `part` makes of each weight. ServiceError INVALID_WEIGHTS unless all are there and fit."""
        files = TensorFiles(directory, STEM)
        if not files.shapes:
            raise ServiceError(Reason.INVALID_WEIGHTS, f"no {STEM}.safetensors, nor shards of it")
        given = {self._live(name): shape for name, shape in files.shapes.items()}
        for name in self._tied:
            # Some write tied weights twice. They must then be what they are tied to.
            if name in given and name not in shapes:
                shape = given.pop(name)
                if not any(
                    shape == other_shape
                    and torch.equal(files.tensor(self._filed(name)), files.tensor(self._filed(other)))
                    for other, other_shape in given.items()
                    if other_shape == shape
                ):
                    text = f"{name} is tied to another weight in this model, and is not that weight there"
                    raise ServiceError(Reason.INVALID_WEIGHTS, text)
        check_shapes(shapes, given)
        found = ((self._live(name), tensor) for name, tensor in files.tensors())
        return {name: part(name, tensor) for name, tensor in found if name in shapes}

    def _filed(self, name: str) -> str:
        """What the base's files call a weight of the model."""
        others = (filed + name.removeprefix(live) for live, filed in self._otherwise if name.startswith(live))
        return next((other for other in others if name not in self._stored and other in self._stored), name)

    def _live(self, name: str) -> str:
        """`_filed` backwards."""
        others = (
            live + name.removeprefix(filed) for live, filed in self._otherwise if name.startswith(filed)
        )
        return next((other for other in others if self._filed(other) == name), name)


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Say in which precision the weights are, wherever the configuration speaks of it."""
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _DTYPE_KEYS:
            if key in section:
                section[key] = dtype
    if not any(key in config for key in _DTYPE_KEYS):
        config["dtype"] = dtype
