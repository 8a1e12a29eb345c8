"""What a pass runs: the model of one policy, as the scorer needs it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch.nn import functional

from opentinker_trainer.engine.logprobs import LowRank
from opentinker_trainer.engine.numerics import accumulator

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class HeadAdapter:
    """An adapter of the output layer: it adds scale * hidden @ a^T @ b^T to the logits."""

    a: Tensor
    """[R, H]"""
    b: Tensor
    """[V, R]"""
    scale: float

    def of(self, hidden: Tensor) -> LowRank:
        """For rows of hidden states [N, H]; in float32, as peft computes adapters."""
        inner = functional.linear(hidden.to(self.a.dtype), self.a) * self.scale
        return LowRank(inner, self.b)


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """From hidden states to logits."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    adapter: HeadAdapter | None = None


@dataclass(frozen=True, slots=True)
class ValueHead:
    """A linear map from a hidden state to one number."""

    weight: Tensor
    """[1, H], float32 (float64 for float64 models)."""
    bias: Tensor
    """[1]"""

    def of(self, hidden: Tensor) -> Tensor:
        """Values [N] of rows [N, H]."""
        return functional.linear(hidden.to(accumulator(self.weight.dtype)), self.weight, self.bias)[:, 0]


class ModelView(Protocol):
    """One policy's model. Use it only while the policy is active."""

    @property
    def decoder(self) -> Callable[..., Any]:
        """The model without its output layer."""
        ...

    @property
    def output(self) -> OutputLayer:
        """The output layer; ask for it within `run`."""
        ...

    @property
    def value_head(self) -> ValueHead | None:
        """The value head, where the policy has one."""
        ...

    @property
    def in_step(self) -> bool:
        """Whether forward and backward are collective calls: every rank makes the same number of them."""
        ...

    def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run a micro-batch's model calls."""
        ...

    def differentiate(self, term: Tensor, into: dict[str, Tensor], *, keep_graph: bool) -> None:
        """Add the gradient of a scalar to `into`, by parameter name; fills it where it is empty."""
        ...
