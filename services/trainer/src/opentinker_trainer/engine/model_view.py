"""What a pass runs: the model of one policy, as the scorer needs it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch.nn import functional

from opentinker_trainer.engine.logprobs import LowRank
from opentinker_trainer.engine.ranks import Ranks

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
        """For hidden states [N, H]; in float32, as peft computes adapters."""
        return LowRank(functional.linear(hidden.to(self.a.dtype), self.a) * self.scale, self.b)


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """From hidden states to logits."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    adapter: HeadAdapter | None = None


@dataclass(frozen=True, slots=True)
class ValueHead:
    """A linear map from a hidden state to one number, in float32 (float64 for float64 models)."""

    weight: Tensor
    """[1, H]"""
    bias: Tensor
    """[1]"""

    def of(self, hidden: Tensor) -> Tensor:
        """Values [N] of rows [N, H]."""
        # Not a view: FSDP hangs its backward hooks on what a forward pass returns.
        return hidden.to(self.weight.dtype) @ self.weight[0] + self.bias


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
        """Whether `run` and `differentiate` are collective: every rank calls them in the same order, and
        every term depends on the output layer.
        """
        ...

    @property
    def side_by_side(self) -> bool:
        """Whether several micro-batches may run at once: calls from several threads are safe, and gradients
        are small enough to have one for each.
        """
        ...

    def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run a micro-batch's model calls."""
        ...

    def differentiate(self, term: Tensor, into: dict[str, Tensor], *, keep_graph: bool) -> None:
        """Add the gradient of a scalar to `into`, by parameter name; fills it where it is empty."""
        ...

    def reduce(self, gradients: dict[str, dict[str, Tensor]], ranks: Ranks) -> None:
        """Sum what ranks have of a pass's gradients by bucket, unless `differentiate` did. Collective."""
        ...
