"""Who asks for what, and what is given back piece by piece."""

import hashlib
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Generic, TypeVar

from opentinker_gateway.domain.book import Entry
from opentinker_gateway.domain.callers import Caller
from opentinker_gateway.domain.messages import Call
from opentinker_gateway.domain.sampling import Event, Finished, PromptScores, Started, Tokens, Waiting
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason


@dataclass(frozen=True, slots=True)
class Ask:
    """One call, beside its body."""

    caller: Caller
    body_digest: str
    idempotency_key: str
    is_retry: bool
    """The client says that it made this call before."""
    entry: Entry | None = None
    """The recorded episode that it belongs to."""

    @property
    def retry(self) -> str:
        """Equal for a call and its retries."""
        return self.idempotency_key or self.body_digest

    @property
    def repeatable(self) -> bool:
        """Whether the same call may come again and must then get the same answer."""
        return bool(self.idempotency_key)

    def request_id(self, what: str) -> str:
        """The id under which the engine knows it: fresh, or a function of the caller's idempotency key."""
        if not self.idempotency_key:
            return f"gateway-{uuid.uuid4().hex}"
        text = f"{self.caller.digest}/{what}/{self.idempotency_key}"
        return f"gateway-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of the reply `index`: text and tokens, which need not come together."""

    index: int
    text: str
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The reply calls a tool, its `number`-th call."""

    index: int
    number: int
    call: Call


@dataclass(frozen=True, slots=True)
class End:
    """The reply is over."""

    index: int
    reason: str
    """OpenAI's finish_reason."""
    finished: Finished


Piece = TextPiece | CallPiece | End | Waiting | PromptScores
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Run(Generic[P]):
    """A call that was accepted: what can be refused has been."""

    id: str
    started: Started
    weights: str
    pieces: AsyncGenerator[P, None]


async def accepted(events: AsyncGenerator[Event, None]) -> Started:
    """Wait until the engine has accepted a request; what it refuses is raised here."""
    async for event in events:
        if isinstance(event, Started):
            return event
    raise ServiceError(Reason.INTERNAL, "the engine said nothing")


def call_id(base: str, index: int, number: int) -> str:
    """The same for a call of the same reply, however often that is given."""
    return "call_" + hashlib.sha256(f"{base}/{index}/{number}".encode()).hexdigest()[:24]
