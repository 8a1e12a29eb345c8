"""What a policy trains, behind one interface: an adapter over the shared base, or a copy of all weights."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from opentinker_trainer.domain.tuning import TuningSpec
from opentinker_trainer.engine.model_view import ModelView, ValueHead
from opentinker_trainer.engine.tensor_files import Writer

Gradient = dict[str, Tensor]
"""Parameter name -> gradient."""

ValueT = TypeVar("ValueT")

HEAD_WEIGHT, HEAD_BIAS = "value_head.weight", "value_head.bias"


class Weights(Protocol):
    """The trained weights of one policy.

    Over several ranks each holds its part of what is cut, and the same as all others of what is not. Methods
    that say so are collective: every rank calls them, in the same order.
    """

    @property
    def spec(self) -> TuningSpec:
        """What is trained."""
        ...

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Name -> float32 weights that the optimizer moves (this rank's part), in name order."""
        ...

    @property
    def view(self) -> ModelView:
        """What a pass runs."""
        ...

    def active(self) -> AbstractContextManager[None]:
        """Within, `view` is the policy's model."""
        ...

    def norm(self, gradient: Mapping[str, Tensor]) -> float:
        """Euclidean norm over all tensors and ranks, in float64; NaN or inf if any entry is. Collective."""
        ...

    def changed(self) -> None:
        """The parameters were written to; a forward pass must see it."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole parameter."""
        ...

    def whole(self, name: str, part: Tensor) -> Tensor | None:
        """Put this rank's part of something shaped like a parameter together with the others'; None on all
        ranks but the first. Collective.
        """
        ...

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of something shaped like a parameter."""
        ...

    def save(self, writer: Writer, *, exact: bool) -> None:
        """Write the weights without the value head as PEFT, transformers and vLLM load them. `exact`: in full
        precision, or else in that of the forward pass. Collective.
        """
        ...

    def load(self, directory: Path) -> dict[str, Tensor]:
        """This rank's part of weights that `save` or others wrote, without the value head.

        ServiceError INVALID_WEIGHTS, the same on every rank, unless they fit.
        """
        ...

    def delete(self) -> None:
        """Free what they take."""
        ...


def new_value_head(width: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """A value head that says 0 everywhere, which leaves the policy below as it is until it has learned."""
    weight = torch.zeros(1, width, dtype=dtype, device=device, requires_grad=True)
    bias = torch.zeros(1, dtype=dtype, device=device, requires_grad=True)
    return {HEAD_BIAS: bias, HEAD_WEIGHT: weight}


def value_head_of(parameters: Mapping[str, Tensor]) -> ValueHead | None:
    """The value head among a policy's parameters."""
    if HEAD_WEIGHT not in parameters:
        return None
    return ValueHead(parameters[HEAD_WEIGHT], parameters[HEAD_BIAS])


def without_value_head(values: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """What belongs to other parameters."""
    return {name: value for name, value in values.items() if name not in (HEAD_WEIGHT, HEAD_BIAS)}


def accumulate(gradients: Mapping[str, Tensor], into: Gradient, dtype: torch.dtype | None = None) -> None:
    """Add gradients to what was accumulated in `dtype` (theirs, if None); becomes it where there is nothing
    yet.
    """
    for name, gradient in gradients.items():
        kept = into.get(name)
        if kept is None:
            into[name] = gradient if dtype is None else gradient.to(dtype)
        else:
            kept.add_(gradient)
