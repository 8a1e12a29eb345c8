"""Several LoRA adapters over one frozen base.

peft keeps one adapter active and quietly activates another when the active one is deleted, with gradients on.
So nothing here relies on what was active before: every operation names its adapter (`active`), and parameters
are found by name.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.tuning import LoraSpec
from opentinker_trainer.engine.base_model import BaseModel
from opentinker_trainer.engine.lora_linear import speed_up
from opentinkerapi.runtime.reasons import Reason


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter in the model."""

    key: str
    """Its name inside peft; never used twice in a process."""
    spec: LoraSpec
    parameters: dict[str, Tensor]
    """Name as in a PEFT file (`base_model.model....lora_A.weight`) -> float32 master weight, sorted."""


class AdapterBank:
    """The adapters that live on a base model."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._peft: Any = None
        self._keys = (f"a{number}" for number in itertools.count())

    def create(self, spec: LoraSpec, generator: torch.Generator) -> Adapter:
        """Add an adapter: A drawn from `generator`, B zero, so that it changes nothing yet.

        ServiceError INVALID_FIELD if a target is no linear layer of the model.
        """
        unknown = sorted(set(spec.target_modules) - set(self._base.linear_layers))
        if unknown:
            known = ", ".join(self._base.linear_layers)
            text = f"{unknown[0]!r} is no linear layer of this model; it has {known}"
            raise ServiceError(Reason.INVALID_FIELD, text, field="tuning.lora.target_modules")
        key = next(self._keys)
        config = peft.LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            target_modules=list(spec.target_modules),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        if self._peft is None:
            self._peft = peft.PeftModel(self._base.model, config, adapter_name=key)
        else:
            self._peft.add_adapter(key, config)
        self._peft.eval()
        for layer in self._peft.modules():
            if isinstance(layer, LoraLayer):
                speed_up(layer)
        adapter = Adapter(key, spec, self._parameters(key))
        with torch.no_grad():
            for name, parameter in adapter.parameters.items():
                if ".lora_A." in name:
                    torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
                else:
                    parameter.zero_()
        return adapter

    def delete(self, adapter: Adapter) -> None:
        """Remove an adapter; the last one leaves the bare base model."""
        if set(self._peft.peft_config) == {adapter.key}:
            model = self._peft.unload()
            # Left behind by peft, which would take it for an adapter that is still there.
            if hasattr(model, "peft_config"):
                del model.peft_config
            self._peft = None
        else:
            # Not the active one, of which peft warns that it activates another.
            self._peft.set_adapter(next(key for key in self._peft.peft_config if key != adapter.key))
            self._peft.delete_adapter(adapter.key)

    @contextmanager
    def active(self, adapter: Adapter) -> Iterator[None]:
        """Within, the model is the base plus this adapter, and only its parameters take gradients."""
        self._peft.set_adapter(adapter.key)
        yield

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """Within, the model is the bare base."""
        if self._peft is None:
            yield
            return
        with self._peft.disable_adapter():
            yield

    def _parameters(self, key: str) -> dict[str, Tensor]:
        found = {
            name.replace(f".{key}.", "."): parameter
            for name, parameter in self._peft.named_parameters()
            if f".lora_A.{key}." in name or f".lora_B.{key}." in name
        }
        return dict(sorted(found.items()))
