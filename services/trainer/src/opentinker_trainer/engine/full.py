"""Full-parameter policies: each trains a copy of all weights, the base stays as it is.

Optimizer and files work on float32 weights. In a float32 forward pass these are the model's own; otherwise
the model holds a copy in the precision of the forward pass, made anew after every step. Over several ranks
the weights are cut with FSDP2: a rank keeps its part in float32, and layers are put together, in the
precision of the forward pass, while they run.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opentinker_kit.errors import ServiceError
from opentinker_kit.vision import in_tower
from opentinker_trainer.domain.tuning import FullSpec
from opentinker_trainer.engine import packing
from opentinker_trainer.engine.base_model import BaseModel, decoder_of, load_model, output_of
from opentinker_trainer.engine.checkpointing import decoder_layers, recomputing
from opentinker_trainer.engine.model_files import ModelFiles
from opentinker_trainer.engine.model_view import OutputLayer, ResultT, ValueHead
from opentinker_trainer.engine.numerics import DTYPES, accumulator
from opentinker_trainer.engine.optimizer import global_norm
from opentinker_trainer.engine.ranks import Ranks
from opentinker_trainer.engine.sharding import Sharded
from opentinker_trainer.engine.tensor_files import Writer
from opentinker_trainer.engine.weights import (
    HEAD_BIAS,
    HEAD_WEIGHT,
    Gradient,
    accumulate,
    new_value_head,
    value_head_of,
    without_value_head,
)
from opentinkerapi.runtime.reasons import Reason


class _CopyView:
    """A model of one policy alone."""

    def __init__(self, model: Any, trained: Mapping[str, Tensor], value_head: ValueHead | None) -> None:
        """`trained`: what takes the gradient, in the precision of the forward pass."""
        self._model = model
        self._trained = dict(trained)
        self.value_head = value_head

    @property
    def decoder(self) -> Callable[..., Any]:
        decoder: Callable[..., Any] = decoder_of(self._model)
        return decoder

    @property
    def output(self) -> OutputLayer:
        return OutputLayer(*output_of(self._model))

    @property
    def in_step(self) -> bool:
        return False

    @property
    def side_by_side(self) -> bool:
        # A gradient has the size of the model.
        return False

    def run(self, work: Callable[[], ResultT]) -> ResultT:
        return work()

    def differentiate(self, term: Tensor, into: Gradient, *, keep_graph: bool) -> None:
        gradients = torch.autograd.grad(
            term,
            list(self._trained.values()),
            retain_graph=keep_graph,
            allow_unused=True,
            materialize_grads=True,
        )
        accumulate(dict(zip(self._trained, gradients, strict=True)), into, accumulator(term.dtype))

    def reduce(self, gradients: dict[str, Gradient], ranks: Ranks) -> None:
        """One rank has everything."""


class _ShardedView(_CopyView):
    """A model that is cut over ranks; a replicated value head beside it."""

    def __init__(self, model: Any, sharded: Sharded, head: dict[str, Tensor]) -> None:
        super().__init__(model, head, value_head_of(head))
        self._sharded = sharded

    @property
    def in_step(self) -> bool:
        return True

    def run(self, work: Callable[[], ResultT]) -> ResultT:
        return self._sharded.run(work)

    def differentiate(self, term: Tensor, into: Gradient, *, keep_graph: bool) -> None:
        dtype = accumulator(term.dtype)
        accumulate(self._sharded.gradients(term, keep_graph=keep_graph), into, dtype)
        accumulate(
            {
                name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for name, parameter in self._trained.items()
            },
            into,
            dtype,
        )
        for parameter in self._trained.values():
            parameter.grad = None

    def reduce(self, gradients: dict[str, Gradient], ranks: Ranks) -> None:
        ranks.sum_gradients(gradients, self._trained)


class FullWeights:
    """A copy of the base's weights, and the value head beside it; see `Weights`."""

    def __init__(self, base: BaseModel, spec: FullSpec, ranks: Ranks, files: ModelFiles) -> None:
        """ServiceError UNSUPPORTED_OPTION for a base whose files cannot be written."""
        self.spec = spec
        self._ranks = ranks
        self._files = files
        compute = {name: weight.dtype for name, weight in base.named_weights()}
        width = accumulator(base.output[0].dtype)
        model = load_model(base.path, width, base.attention, base.device)
        packing.enable(model, decoder_of(model))
        weights: dict[str, Tensor] = dict(model.named_parameters())
        if weights.keys() != compute.keys():
            text = "this model's weights cannot be told apart from what was added to them"
            raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="tuning.full")
        if base.vision is not None and ranks.count > 1:
            text = "full-parameter policies of models that see images are trained by one rank only"
            raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="tuning.full")
        files.check(weights)
        self._shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self._frozen = {name: weight for name, weight in weights.items() if in_tower(name)}
        """What images are seen with is not trained."""
        masters = {name: weight for name, weight in weights.items() if name not in self._frozen}
        model.requires_grad_(False)
        for weight in masters.values():
            weight.requires_grad_(True)
        self._model = model
        self._layers = decoder_layers(model)
        # What is exported is what the forward pass computes with.
        same, forward = base.forward_dtype == base.dtype, DTYPES[base.forward_dtype]
        self._dtypes = {name: dtype if same else forward for name, dtype in compute.items()}
        self._copies: dict[str, Tensor] = {}
        self._sharded: Sharded | None = None
        head = new_value_head(base.hidden_size, width, base.device) if spec.value_head else {}
        self._shapes |= {name: tuple(tensor.shape) for name, tensor in head.items()}
        if ranks.count > 1:
            self._sharded = Sharded(model, self._layers, DTYPES[base.forward_dtype])
            masters = self._sharded.parts()
            self.view: _CopyView = _ShardedView(model, self._sharded, head)
        else:
            # What the optimizer moves: the model's own weights, unless it gets narrower copies of them.
            masters = {name: weight.detach() for name, weight in masters.items()}
            self._copies = self._narrow(compute) if same else {}
            trained = {name: weights[name] for name in masters}
            self.view = _CopyView(model, trained | head, value_head_of(head))
        self.parameters: dict[str, Tensor] = dict(sorted((masters | head).items()))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, layers recompute their activations if the policy asks for it."""
        with recomputing(self._layers if self.spec.activation_checkpointing else ()):
            yield

    def norm(self, gradient: Mapping[str, Tensor]) -> float:
        if self._sharded is None:
            return global_norm(gradient)
        own = without_value_head(gradient)
        squares = self._ranks.sum(global_norm(own) ** 2)
        return math.sqrt(squares + global_norm({k: v for k, v in gradient.items() if k not in own}) ** 2)

    def changed(self) -> None:
        """Have the forward pass see what the optimizer wrote."""
        with torch.no_grad():
            for name, copy in self._copies.items():
                if name not in self._frozen:
                    copy.copy_(self.parameters[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def whole(self, name: str, part: Tensor) -> Tensor | None:
        if self._sharded is None or name in (HEAD_WEIGHT, HEAD_BIAS):
            return part if self._ranks.first else None
        whole = self._sharded.whole(part, self._shapes[name])
        return whole if self._ranks.first else None

    def part(self, name: str, whole: Tensor) -> Tensor:
        if self._sharded is None or name in (HEAD_WEIGHT, HEAD_BIAS):
            return whole
        return self._sharded.part(whole)

    def save(self, writer: Writer, *, exact: bool) -> None:
        weights = without_value_head(self.parameters) | self._frozen
        self._files.save(
            writer,
            {name: self._shapes[name] for name in weights},
            lambda name: self.whole(name, weights[name]),
            lambda name: weights[name].dtype if exact else self._dtypes[name],
        )

    def load(self, directory: Path) -> dict[str, Tensor]:
        shapes = {name: self._shapes[name] for name in without_value_head(self._shapes)}
        loaded = self._files.load(directory, shapes, self._taken)
        return {name: weight for name, weight in loaded.items() if name not in self._frozen}

    def _taken(self, name: str, whole: Tensor) -> Tensor:
        frozen = self._frozen.get(name)
        if frozen is None:
            return self.part(name, whole)
        if not torch.equal(whole.to(frozen.dtype), frozen):
            text = f"{name} is not what it is in the base model, and this policy does not train it"
            raise ServiceError(Reason.INVALID_WEIGHTS, text)
        return frozen

    def delete(self) -> None:
        """Nothing else holds the copy."""

    def _narrow(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Give the model copies of its weights in the precision of the forward pass, where that differs."""
        copies: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            if parameter.dtype != dtypes[name]:
                parameter.data = parameter.data.to(dtypes[name])
                copies[name] = parameter
        return copies
