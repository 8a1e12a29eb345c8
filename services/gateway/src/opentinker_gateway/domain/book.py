"""The episodes that are being recorded: so many at most, each for so long after its last call."""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from opentinker_gateway.domain.callers import Caller
from opentinker_gateway.domain.episodes import NO_LIMITS, Episode, EpisodeLimits
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

TOKEN_PREFIX = "episode-"
"""Begins the keys of episodes, which open nothing but the one episode."""


@dataclass(frozen=True, slots=True)
class BookLimits:
    """What is kept in memory at most."""

    episodes: int
    tokens_per_episode: int
    tokens: int
    """Of all episodes together."""
    calls_per_episode: int
    idle_s: float


@dataclass(slots=True)
class Entry:
    """An episode with what opens it."""

    episode: Episode
    creator: Caller
    """With whose key its calls are made."""
    token: str
    last_used: float
    calls: int = 0
    """Being answered now; it does not expire meanwhile."""


class EpisodeBook:
    """All recorded episodes of this gateway. They are gone when it ends: whoever plays them plays again."""

    def __init__(self, limits: BookLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._by_token: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def create(
        self,
        request_id: str,
        caller: Caller,
        *,
        model: str,
        weights: str,
        group: str,
        seed: int,
        overrides: Mapping[str, object],
        limits: EpisodeLimits = NO_LIMITS,
    ) -> Entry:
        """A new episode, or the one that this request made before. OVERLOADED if there are too many."""
        self._expire()
        identifier = hashlib.sha256(f"{caller.digest}/{request_id}".encode()).hexdigest()[:24]
        if identifier in self._entries:
            known = self._entries[identifier]
            was = known.episode
            same = (was.model, was.group, was.seed, was.limits) == (model, group, seed, limits)
            if not same or was.overrides != overrides:
                raise ServiceError(Reason.REQUEST_ID_REUSED, field="request_id")
            return known
        full = len(self._entries) >= self._limits.episodes
        if full or sum(each.episode.tokens for each in self._entries.values()) >= self._limits.tokens:
            text = f"{len(self._entries)} episodes are being recorded; end some, or wait until they expire"
            raise ServiceError(Reason.OVERLOADED, text, retry_after_s=1.0)
        episode = Episode(
            id=identifier,
            model=model,
            weights=weights,
            group=group,
            owner=caller.digest,
            seed=seed,
            overrides=overrides,
            max_tokens=self._limits.tokens_per_episode,
            max_calls=self._limits.calls_per_episode,
            limits=limits,
        )
        token = TOKEN_PREFIX + secrets.token_urlsafe(32)
        entry = Entry(episode, caller, token, self._clock.monotonic())
        self._entries[identifier] = entry
        self._by_token[_digest(token)] = entry
        return entry

    def get(self, identifier: str, caller: Caller) -> Entry:
        """An episode of this caller. EPISODE_NOT_FOUND for any other."""
        self._expire()
        entry = self._entries.get(identifier)
        if entry is None or entry.episode.owner != caller.digest:
            text = f"no episode {identifier!r}: it ended, expired, or the gateway was restarted"
            raise ServiceError(Reason.EPISODE_NOT_FOUND, text)
        entry.last_used = self._clock.monotonic()
        return entry

    def opened_by(self, token: str) -> Entry | None:
        """The episode that a key opens."""
        self._expire()
        entry = self._by_token.get(_digest(token))
        if entry is not None:
            entry.last_used = self._clock.monotonic()
        return entry

    def end(self, identifier: str, caller: Caller) -> None:
        """Forget an episode; its key opens nothing any more."""
        self._forget(self.get(identifier, caller))

    def idle_s(self) -> float:
        """How long an episode lasts without a call."""
        return self._limits.idle_s

    def _expire(self) -> None:
        now = self._clock.monotonic()
        over = [
            entry
            for entry in self._entries.values()
            if not entry.calls and now - entry.last_used > self._limits.idle_s
        ]
        for entry in over:
            self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.episode.id]
        del self._by_token[_digest(entry.token)]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
