"""Snapshots of episodes, and episodes that go on from them.

A snapshot always holds what an episode was played from: seed and actions. Where the environment allows it,
it also holds its state, taken by its own methods or as a copy in a worker; then going on costs no replay.
Without it the episode is played again at its next call and compared, answer by answer, as after the death of
a worker.
"""

import json
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from opentinker_env_host.domain.answers import FirstAnswers
from opentinker_env_host.domain.episode import Answered, Episode, Recipe, Turn
from opentinker_env_host.domain.player import Player
from opentinker_env_host.ports import Plain, Reply, Worker, WorkerError
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

if TYPE_CHECKING:
    from opentinker_env_host.domain.host import EnvironmentHost

log = structlog.get_logger()

NATIVE, COPY, REPLAY = "NATIVE", "COPY", "REPLAY"
KEPT_S = 600.0
MAX_OF_OWNER = 1024
MAX_STATE_BYTES = 4 << 20
_DROP_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Snapshot:
    """An episode as it was."""

    name: str
    episode: str
    owner: str
    project: str
    recipe: Recipe
    kind: str
    state: Plain | None
    holder: Worker | None
    """The worker that has the copy."""
    first: Reply
    first_digest: str
    journal: tuple[Turn, ...]
    last_key: bytes
    last_answer: Answered | None
    done: bool
    used: float

    @property
    def seq(self) -> int:
        """Of the last step before it."""
        return len(self.journal)

    def put(self, episode: Episode) -> None:
        """Have an episode be at this place."""
        episode.first, episode.first_digest = self.first, self.first_digest
        episode.journal = list(self.journal)
        episode.last_seq, episode.last_key, episode.last_answer = self.seq, self.last_key, self.last_answer
        episode.done, episode.result = self.done, None


@dataclass(frozen=True, slots=True)
class Forked:
    """Episodes that go on from a snapshot."""

    group: str
    episodes: tuple[str, ...]
    kind: str
    next_seq: int
    lease_ttl_s: float


class Forks:
    """See the module's text. All methods raise ServiceError."""

    def __init__(self, host: "EnvironmentHost", player: Player, clock: Clock, journal_steps: int) -> None:
        self._host = host
        self._player = player
        self._clock = clock
        self._journal_steps = journal_steps
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()
        self._taken: FirstAnswers[Snapshot] = FirstAnswers(clock)
        self._forked: FirstAnswers[Forked] = FirstAnswers(clock)
        self._restored: FirstAnswers[tuple[str, int]] = FirstAnswers(clock)

    async def snapshot(self, request_id: str, episode: str, owner: str = "") -> Snapshot:
        """Take one; a repetition gets the first answer."""
        self._host.episode(episode, owner)
        return await self._taken.get(
            request_id, json.dumps([episode]), lambda: self._take(episode, owner), scope=owner
        )

    async def fork(
        self, request_id: str, snapshot: str, size: int, owner: str = "", project: str = ""
    ) -> Forked:
        """Open episodes that go on from it; a repetition gets the first answer."""
        body = json.dumps([snapshot, size])
        return await self._forked.get(
            request_id, body, lambda: self._fork(snapshot, size, owner, project), scope=owner
        )

    async def restore(self, request_id: str, episode: str, snapshot: str, owner: str = "") -> tuple[str, int]:
        """Take an episode back; how, and its next seq. A repetition gets the first answer."""
        self._host.episode(episode, owner)
        body = json.dumps([episode, snapshot])
        return await self._restored.get(
            request_id, body, lambda: self._restore(episode, snapshot, owner), scope=owner
        )

    async def tidy(self) -> None:
        """Now and then: forget what nobody used for long."""
        limit = self._clock.monotonic() - KEPT_S
        for snapshot in [each for each in self._snapshots.values() if each.used < limit]:
            del self._snapshots[snapshot.name]
            if snapshot.holder is not None and snapshot.holder.alive:
                try:
                    await snapshot.holder.call("drop", _DROP_TIMEOUT_S, snapshot=snapshot.name)
                except WorkerError as error:
                    log.info("a snapshot was not dropped", snapshot=snapshot.name, error=str(error))

    async def _take(self, name: str, owner: str) -> Snapshot:
        held = sum(each.owner == owner for each in self._snapshots.values())
        if held >= MAX_OF_OWNER:
            text = f"{held} snapshots are kept, which is the limit; those that nobody uses go by themselves"
            raise ServiceError(Reason.QUOTA_EXCEEDED, text, quota=[(owner or "snapshots", text)])
        episode = self._host.episode(name, owner)
        async with self._host.at(episode):
            if episode.first is None:
                raise ServiceError(Reason.INVALID_STATE, f"{name} has not begun: call Begin first")
            if episode.result is not None:
                raise ServiceError(
                    Reason.INVALID_STATE, f"{name} was finalized: there is nothing to go on with"
                )
            called = f"snapshots/{secrets.token_hex(12)}"
            reply = await self._player.snapshot(episode, called)
            kind, state = str(reply.answer["kind"]), reply.answer.get("state")
            why = str(reply.answer.get("why", ""))
            if kind == NATIVE and len(json.dumps(state)) > MAX_STATE_BYTES:
                kind, why = "", f"its state is over {MAX_STATE_BYTES >> 20} MiB"
            if kind not in (NATIVE, COPY):
                kind, state = self._by_replay(episode, why), None
            snapshot = Snapshot(
                called,
                name,
                episode.owner,
                episode.project,
                episode.recipe,
                kind,
                state if kind == NATIVE else None,
                episode.worker if kind == COPY else None,
                episode.first,
                episode.first_digest,
                tuple(episode.journal),
                episode.last_key,
                episode.last_answer,
                episode.done,
                self._clock.monotonic(),
            )
            self._snapshots[called] = snapshot
            return snapshot

    async def _fork(self, name: str, size: int, owner: str, project: str) -> Forked:
        snapshot = self._find(name, owner)
        group = secrets.token_hex(8)
        names = tuple(f"episodes/{group}-{member}" for member in range(size))
        self._host.check_group(size, project)
        expires_at = self._clock.monotonic() + snapshot.recipe.lease_ttl_s
        made = [Episode(each, snapshot.recipe, expires_at, owner, project) for each in names]
        for episode in made:
            snapshot.put(episode)
        self._host.adopt(made)
        kinds = set()
        for episode in made:
            async with self._host.at(episode):
                try:
                    kinds.add(await self._attach(episode, snapshot))
                except ServiceError:
                    await self._host.close(names, owner)
                    raise
        kind = REPLAY if REPLAY in kinds else snapshot.kind
        return Forked(f"groups/{group}", names, kind, snapshot.seq + 1, snapshot.recipe.lease_ttl_s)

    async def _restore(self, name: str, snapshot_name: str, owner: str) -> tuple[str, int]:
        snapshot = self._find(snapshot_name, owner)
        if snapshot.episode != name:
            text = f"{snapshot_name} is of {snapshot.episode}; Fork makes episodes of it"
            raise ServiceError(Reason.INVALID_FIELD, text, field="snapshot")
        episode = self._host.episode(name, owner)
        async with self._host.at(episode):
            self._check_attachable(snapshot)
            kind = await self._attach(episode, snapshot)
            snapshot.put(episode)
            self._host.moved(episode)
        return kind, snapshot.seq + 1

    async def _attach(self, episode: Episode, snapshot: Snapshot) -> str:
        """Give it the state, or leave it to be played again; which."""
        if snapshot.kind != REPLAY:
            if await self._player.attach(episode, snapshot.name, snapshot.state, snapshot.holder):
                return snapshot.kind
            self._check_attachable(snapshot, lost=True)
        else:
            await self._player.detach(episode)
        return REPLAY

    def _check_attachable(self, snapshot: Snapshot, *, lost: bool = False) -> None:
        """INVALID_STATE where the state is gone and playing again is no way."""
        gone = lost or (snapshot.kind == COPY and (snapshot.holder is None or not snapshot.holder.alive))
        deterministic = self._host.facts(snapshot.recipe.environment).deterministic
        if gone and not (deterministic and snapshot.seq <= self._journal_steps):
            text = f"{snapshot.name} was lost with its worker, and its environment does not repeat itself"
            raise ServiceError(Reason.INVALID_STATE, text)

    def _by_replay(self, episode: Episode, why: str) -> str:
        reason = ""
        if not self._host.facts(episode.recipe.environment).deterministic:
            reason = "its environment does not promise to repeat itself"
        elif len(episode.journal) > self._journal_steps:
            reason = f"it has {len(episode.journal)} steps and at most {self._journal_steps} are replayed"
        if reason:
            text = f"no snapshot of {episode.name} can be taken: {why + ', and ' if why else ''}{reason}"
            raise ServiceError(Reason.INVALID_STATE, text)
        return REPLAY

    def _find(self, name: str, owner: str) -> Snapshot:
        snapshot = self._snapshots.get(name)
        if snapshot is None or owner not in ("", snapshot.owner):
            raise ServiceError(
                Reason.SNAPSHOT_NOT_FOUND,
                f"no {name[:80]!r} here, or nobody used it for long",
                field="snapshot",
            )
        snapshot.used = self._clock.monotonic()
        return snapshot
