"""Opponents that are not trained: frozen versions, and pools of them for league play."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from opentinker.errors import invalid

LATEST: Final = "latest"
"""Drawn from a pool: the newest version."""

KEPT = 0.98
"""What an older game weighs beside the next one: the learner changes, and so do its chances."""

Weighting = Literal["hard", "even", "uniform"]


@dataclass(frozen=True, slots=True)
class Frozen:
    """An opponent that stays as it is: a version of a policy. `policy` is a Policy, or the name of one of the
    run; "" is the run's own. Version 0 is the policy as it was made.
    """

    policy: Any = ""
    version: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.version, int) or self.version < 0:
            raise invalid("version", f"must be a version number, not {self.version!r}")


@dataclass(slots=True)
class _Record:
    """Games of the learner against one opponent, the older ones weighing less, and its score in them: 1 a
    win, 1/2 a draw.
    """

    games: float = 0.0
    score: float = 0.0

    @property
    def rate(self) -> float:
        """The learner's score, from one imagined draw on."""
        return (self.score + 0.5) / (self.games + 1.0)


class OpponentPool:
    """Past versions of a policy, one drawn for each group.

    `weighting`: "hard" draws those most that the learner loses to, (1 - p)^2 of its score p; "even" those
    that are about as good, p (1 - p); "uniform" all alike (prioritized fictitious self-play, as in
    AlphaStar). With probability `latest` the newest version is drawn instead. Every `every`th version
    joins; of more than `size` the one that would be drawn least leaves. `others` are there from the start
    and stay: `ot.Frozen`, scripts.
    """

    def __init__(
        self,
        policy: str = "",
        *,
        size: int = 16,
        every: int = 1,
        weighting: Weighting = "hard",
        latest: float = 0.2,
        others: Sequence[Any] = (),
    ) -> None:
        for name, value in {"size": size, "every": every}.items():
            if value < 1:
                raise invalid(name, f"must be at least 1, not {value}")
        if weighting not in ("hard", "even", "uniform"):
            raise invalid("weighting", f"must be 'hard', 'even' or 'uniform', not {weighting!r}")
        if not 0.0 <= latest <= 1.0:
            raise invalid("latest", f"must be in [0, 1], not {latest}")
        self.policy = policy
        self.others = tuple(others)
        self._size = size
        self._every = every
        self._weighting = weighting
        self._latest = latest
        self._versions: list[int] = []
        self._records: dict[str, _Record] = {}
        self._offered = -1

    def __repr__(self) -> str:
        return f"OpponentPool(size={self._size}, weighting={self._weighting!r}, latest={self._latest:g})"

    def offer(self, version: int) -> None:
        """A version was published; it joins if it is its turn."""
        if version <= self._offered:
            return
        self._offered = version
        if version % self._every == 0:
            self._versions.append(version)
        if len(self._versions) > self._size:
            # Never the newest: nothing is known of it yet.
            self._versions.remove(min(self._versions[:-1], key=lambda each: (self._weight(each), each)))

    def draw(self, generator: np.random.Generator) -> Any:
        """A version number, LATEST, or one of `others`."""
        entries = [*self._versions, *self.others]
        if generator.random() < self._latest or not entries:
            return LATEST
        weights = np.array([self._weight(each) for each in entries])
        return entries[int(generator.choice(len(entries), p=weights / weights.sum()))]

    def record(self, label: str, score: float) -> None:
        """A game against an opponent has ended: 1 the learner won, 0 it lost, 1/2 a draw."""
        record = self._records.setdefault(label.rsplit("@", 1)[-1], _Record())
        record.games = KEPT * record.games + 1.0
        record.score = KEPT * record.score + score

    @property
    def rates(self) -> Mapping[str, float]:
        """The learner's score against each opponent it has met, by version or name."""
        return {name: record.rate for name, record in self._records.items()}

    def state(self) -> dict[str, Any]:
        """All that `restore` needs, as JSON values."""
        return {
            "versions": list(self._versions),
            "offered": self._offered,
            "records": {name: [each.games, each.score] for name, each in self._records.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._versions = [int(version) for version in state["versions"]]
        self._offered = int(state["offered"])
        self._records = {name: _Record(*map(float, each)) for name, each in state["records"].items()}

    def _weight(self, entry: Any) -> float:
        record = self._records.get(_key(entry), _Record())
        weight = {"hard": (1 - record.rate) ** 2, "even": record.rate * (1 - record.rate), "uniform": 1.0}
        # Nobody is forgotten: who is beaten today may be lost to tomorrow.
        return max(weight[self._weighting], 1e-3)


def _key(entry: Any) -> str:
    if isinstance(entry, int):
        return str(entry)
    if isinstance(entry, Frozen):
        return str(entry.version)
    return str(getattr(entry, "__name__", type(entry).__name__))
