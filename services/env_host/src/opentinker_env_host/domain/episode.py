"""One episode: its recipe, its journal, and what may be asked of it next.

Invariant: the answers given so far are exactly those of playing `journal` from `seed`; an episode for which
this can no longer be shown has a `failure` and answers nothing else.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opentinker_env_host.ports import Reply, Worker
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an episode is made of; playing it again needs nothing else."""

    environment: str
    seed: int
    task: Mapping[str, Any]
    options: Mapping[str, Any]
    lease_ttl_s: float
    step_timeout_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """A step that was answered: the action and the digest of the answer."""

    action: Mapping[str, Any]
    digest: str


@dataclass(slots=True)
class Episode:
    """The state of one episode. Only one call at a time works on it (`lock`)."""

    name: str
    recipe: Recipe
    expires_at: float
    """Of the host's monotonic clock."""
    owner: str = ""
    """The job that opened it, to which alone it exists; empty: to all."""
    project: str = ""
    """Of that job."""
    worker: Worker | None = None
    first: Reply | None = None
    first_digest: str = ""
    """Of the first observation, once it was given."""
    journal: list[Turn] = field(default_factory=list)
    last_seq: int = 0
    last_key: bytes = b""
    """The last step's actions as they came, to tell a repetition from another request."""
    last_answer: "Answered | None" = None
    done: bool = False
    """The environment ended it."""
    result: Reply | None = None
    failure: ServiceError | None = None
    crashes: int = 0
    """Workers that died while they worked on it."""
    on_trial: bool = False
    """The call that may have killed its worker is being made again."""
    restores: int = 0
    closed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def begun(self) -> bool:
        """Whether the first observation was given."""
        return bool(self.first_digest)

    @property
    def cold(self) -> bool:
        """Whether it was played by a host before this one, and not yet again here."""
        return self.begun and self.first is None

    def renew(self, now: float) -> None:
        """Someone drives it: the lease starts anew."""
        self.expires_at = now + self.recipe.lease_ttl_s

    def check_alive(self) -> None:
        """The error that ended it, if any."""
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise not_found(self.name)

    def check_step(self, seq: int, key: bytes) -> "Answered | None":
        """The stored answer if `seq` is the last one's again; ServiceError unless `seq` may be played now."""
        if seq == self.last_seq and self.last_answer is not None:
            if key != self.last_key:
                raise ServiceError(
                    Reason.SEQ_REUSED, f"seq {seq} of {self.name} was used with other actions", field="seq"
                )
            return self.last_answer
        if seq != self.last_seq + 1:
            raise self._out_of_order(seq)
        if not self.begun:
            raise ServiceError(Reason.INVALID_STATE, f"{self.name} has not begun: call Begin first")
        if self.done or self.result is not None:
            raise ServiceError(Reason.INVALID_STATE, f"{self.name} has ended: it takes no more steps")
        return None

    def check_last(self, seq: int) -> None:
        """ServiceError unless `seq` was the last step."""
        if seq != self.last_seq:
            raise self._out_of_order(seq)

    def _out_of_order(self, seq: int) -> ServiceError:
        return ServiceError(
            Reason.STEP_OUT_OF_ORDER,
            f"seq {seq} of {self.name} is out of order: the next is {self.last_seq + 1}",
            metadata={"next_seq": self.last_seq + 1},
        )

    def check_movers(self, action: Mapping[str, Any]) -> None:
        """ServiceError unless each agent moves whose move is pending, and nobody else."""
        last = self.last_answer.reply if self.last_answer is not None else self.first
        assert last is not None, "checked by check_step"
        pending, given = set(last.answer["observations"]), set(action["agents"])
        if pending != given:
            text = f"moves of {sorted(pending)} are pending in {self.name}, not of {sorted(given)}"
            raise ServiceError(Reason.INVALID_FIELD, text, field="actions")

    def record(self, seq: int, key: bytes, action: Mapping[str, Any], answered: "Answered") -> None:
        """A step was answered."""
        self.last_seq = seq
        self.last_key = key
        self.last_answer = answered
        self.done = bool(answered.reply.answer["terminated"] or answered.reply.answer["truncated"])
        self.journal.append(Turn(action, answered.reply.digest))


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer of a step. `replayed`: the episode was played again on another worker before it."""

    reply: Reply
    replayed: bool


def not_found(name: str) -> ServiceError:
    """The episode is not known here (any more)."""
    return ServiceError(
        Reason.EPISODE_NOT_FOUND,
        f"no episode {name}: it was closed, its lease expired, or the host was restarted",
        metadata={"episode": name},
    )
