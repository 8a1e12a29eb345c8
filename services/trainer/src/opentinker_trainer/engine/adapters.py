"""Several LoRA adapters over one frozen base.

peft keeps one adapter active and quietly activates another when the active one is deleted, with gradients on.
So nothing here relies on what was active before: every operation names its adapter (`active`), and parameters
are found by name.

Over several ranks each has the whole base and all adapters, and works on its share of the rows: gradients of
adapters are small, and a base that nobody writes to would have to be gathered layer by layer in every
micro-batch if it were cut.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.tuning import OUTPUT_LAYER, LoraSpec
from opentinker_trainer.engine.adapter_files import load_adapter, save_adapter
from opentinker_trainer.engine.base_model import BaseModel
from opentinker_trainer.engine.checkpointing import decoder_layers, recomputing
from opentinker_trainer.engine.lora_linear import speed_up
from opentinker_trainer.engine.model_view import HeadAdapter, OutputLayer, ResultT, ValueHead
from opentinker_trainer.engine.numerics import accumulator
from opentinker_trainer.engine.optimizer import global_norm
from opentinker_trainer.engine.ranks import Ranks
from opentinker_trainer.engine.tensor_files import Writer
from opentinker_trainer.engine.vision import TOWER_MODULES
from opentinker_trainer.engine.weights import Gradient, accumulate, new_value_head, value_head_of
from opentinkerapi.runtime.reasons import Reason


class SharedView:
    """The shared base as it is switched: with an adapter, or bare."""

    def __init__(
        self, base: BaseModel, parameters: Mapping[str, Tensor] | None = None, scale: float = 0.0
    ) -> None:
        """`parameters` are those of an adapter with that scale."""
        self._base = base
        self._parameters = dict(parameters or {})
        self.value_head: ValueHead | None = value_head_of(self._parameters)
        head = {
            name.rpartition(".lora_")[2]: tensor
            for name, tensor in self._parameters.items()
            if f".{base.output_name}.lora_" in name
        }
        self._adapter = HeadAdapter(head["A.weight"], head["B.weight"], scale) if head else None

    @property
    def decoder(self) -> Callable[..., Any]:
        decoder: Callable[..., Any] = self._base.decoder
        return decoder

    @property
    def output(self) -> OutputLayer:
        weight, bias = self._base.output
        return OutputLayer(weight, bias, self._adapter)

    @property
    def in_step(self) -> bool:
        return False

    @property
    def side_by_side(self) -> bool:
        return True

    def run(self, work: Callable[[], ResultT]) -> ResultT:
        return work()

    def differentiate(self, term: Tensor, into: Gradient, *, keep_graph: bool) -> None:
        # What a term does not depend on (the value head in a policy loss) has a gradient of 0.
        gradients = torch.autograd.grad(
            term,
            list(self._parameters.values()),
            retain_graph=keep_graph,
            allow_unused=True,
            materialize_grads=True,
        )
        accumulate(dict(zip(self._parameters, gradients, strict=True)), into, accumulator(term.dtype))

    def reduce(self, gradients: dict[str, Gradient], ranks: Ranks) -> None:
        ranks.sum_gradients(gradients, self._parameters)


class AdapterWeights:
    """One adapter in the model, and the value head beside it; see `Weights`."""

    def __init__(self, bank: "AdapterBank", key: str, spec: LoraSpec, parameters: dict[str, Tensor]) -> None:
        self.key = key
        """Its name inside peft; never used twice in a process."""
        self.spec = spec
        self.parameters = parameters
        """Name as in a PEFT file (`base_model.model....lora_A.weight`) -> float32 master weight, sorted."""
        self._bank = bank
        self.view = SharedView(bank.base, parameters, spec.alpha / spec.rank)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, the model is the base plus this adapter, and only its parameters take gradients."""
        with self._bank.active(self):
            yield

    def norm(self, gradient: Mapping[str, Tensor]) -> float:
        return global_norm(gradient)

    def changed(self) -> None:
        """The parameters are the model's own."""

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.parameters[name].shape)

    def whole(self, name: str, part: Tensor) -> Tensor | None:
        return part if self._bank.ranks.first else None

    def part(self, name: str, whole: Tensor) -> Tensor:
        return whole

    def save(self, writer: Writer, *, exact: bool) -> None:
        targets = self._bank.target_names(self.spec)
        save_adapter(
            self.parameters,
            self.spec,
            self._bank.base_name,
            targets,
            writer,
            excluded=self._bank.excluded,
        )

    def load(self, directory: Path) -> dict[str, Tensor]:
        return load_adapter(self.parameters, self.spec, directory)

    def delete(self) -> None:
        self._bank.delete(self)


class AdapterBank:
    """The adapters that live on a base model."""

    def __init__(self, base: BaseModel, ranks: Ranks, base_name: str) -> None:
        """`base_name` is written into exported adapters."""
        self.base = base
        self.ranks = ranks
        self.base_name = base_name
        self.bare = SharedView(base)
        """The base without any adapter, to be used within `base_only`."""
        self.excluded = None if base.vision is None else TOWER_MODULES
        """Matches modules that no adapter changes although their leaf names are targets."""
        self._peft: Any = None
        self._keys = (f"a{number}" for number in itertools.count())

    def create(self, spec: LoraSpec, generator: torch.Generator) -> AdapterWeights:
        """Add an adapter: A drawn from `generator`, B zero, so that it changes nothing yet.

        ServiceError INVALID_FIELD if a target is no linear layer of the model.
        """
        known = [*self.base.linear_layers, OUTPUT_LAYER]
        unknown = sorted(set(spec.target_modules) - set(known))
        if unknown:
            text = f"{unknown[0]!r} is no linear layer of this model; it has {', '.join(known)}"
            raise ServiceError(Reason.INVALID_FIELD, text, field="tuning.lora.target_modules")
        key = next(self._keys)
        config = peft.LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            target_modules=list(self.target_names(spec)),
            exclude_modules=self.excluded,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            # Of tied embeddings: merging would change both. Nothing is merged here, and the adapter of the
            # output layer is applied beside the weight.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            if self._peft is None:
                self._peft = peft.PeftModel(self.base.model, config, adapter_name=key)
            else:
                self._peft.add_adapter(key, config)
        self._peft.eval()
        for layer in self._peft.modules():
            if isinstance(layer, LoraLayer):
                speed_up(layer)
        parameters = self._parameters(key)
        with torch.no_grad():
            for name, parameter in parameters.items():
                if ".lora_A." in name:
                    # Drawn on the CPU, so that a seed means the same on every device.
                    drawn = torch.empty_like(parameter, device="cpu")
                    torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
                    parameter.copy_(drawn)
                else:
                    parameter.zero_()
        if spec.value_head:
            weight, _ = self.base.output
            parameters |= new_value_head(weight.shape[1], accumulator(weight.dtype), self.base.device)
        return AdapterWeights(self, key, spec, dict(sorted(parameters.items())))

    def delete(self, adapter: AdapterWeights) -> None:
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

    def target_names(self, spec: LoraSpec) -> tuple[str, ...]:
        """Target modules as the model calls them."""
        names = (self.base.output_name if name == OUTPUT_LAYER else name for name in spec.target_modules)
        return tuple(sorted(names))

    @contextmanager
    def active(self, adapter: AdapterWeights) -> Iterator[None]:
        """Within, the model is the base plus this adapter, and only its parameters take gradients."""
        self._peft.set_adapter(adapter.key)
        layers = decoder_layers(self.base.model) if adapter.spec.activation_checkpointing else ()
        with recomputing(layers):
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
        return {
            name.replace(f".{key}.", "."): parameter
            for name, parameter in self._peft.named_parameters()
            if f".lora_A.{key}." in name or f".lora_B.{key}." in name
        }
