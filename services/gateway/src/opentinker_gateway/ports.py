"""What the gateway needs from outside."""

from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from opentinker_gateway.domain.callers import Caller
from opentinker_gateway.domain.prompts import ChatPrompts
from opentinker_gateway.domain.sampling import Event, SamplingOptions


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A name that can be asked for."""

    name: str
    created: int
    owner: str
    root: str
    """The weights that the name stands for now."""


class Model(Protocol):
    """Weights that answer, found by a name."""

    @property
    def weights(self) -> str:
        """The canonical name of the weights: of a base model, a policy version or a checkpoint."""
        ...

    @property
    def fields(self) -> Collection[str]:
        """Sampling options that the engine honours."""
        ...

    @property
    def prompts(self) -> ChatPrompts:
        """The model's tokenizer and template."""
        ...

    def sample(
        self,
        prompt_ids: Sequence[int],
        options: SamplingOptions,
        *,
        n: int,
        request_id: str,
        conversation: str,
        keep: bool = False,
    ) -> AsyncGenerator[Event, None]:
        """Started, then deltas and completions. Closed early, the request is cancelled. `conversation` keeps
        those that share a beginning on one server. `keep`: the same request id may be asked for again.
        """
        ...


class Models(Protocol):
    """The models of a cluster."""

    async def open(self, name: str, caller: Caller) -> Model:
        """The model with that name, waiting until a server has it. UNKNOWN_MODEL and others of its kind."""
        ...

    async def list(self, caller: Caller) -> list[ListedModel]:
        """What a caller may name."""
        ...

    async def describe(self, name: str, caller: Caller) -> ListedModel:
        """One name; nothing is started for it. UNKNOWN_MODEL and others of its kind."""
        ...

    async def ready(self) -> bool:
        """Whether the scheduler answers."""
        ...
