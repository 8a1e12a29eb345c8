"""One adapter as the conformance tests play it."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentinker.environments import Action, EndReason, EnvironmentSession, EnvironmentSource, RewardSum
from opentinker.environments.agents import JointResult, JointStep, Observations

WORLDS = Path(__file__).parent / "worlds"
ADAPTERS = "opentinker.environments.adapters"
SEED = 11

Play = Callable[[int, Observations, random.Random], Mapping[str, str | Action]]
"""What the agents say in a turn (1, 2, 3 …) whose moves are pending. Everything random comes from the
generator,
which is the same for each episode."""


def legal(turn: int, pending: Observations, rng: random.Random) -> Mapping[str, str | Action]:
    """One of its legal actions for each agent."""
    return {name: rng.choice(seen.legal_actions) for name, seen in pending.items()}


def say(*texts: str | Action) -> Play:
    """These in turn, the last one for ever; the same for each agent."""
    return lambda turn, pending, rng: dict.fromkeys(pending, texts[min(turn, len(texts)) - 1])


@dataclass(frozen=True, slots=True)
class Ending:
    """A way to play to an end (with SEED and the case's task), and what it comes to."""

    play: Play
    end: EndReason = EndReason.TERMINATED
    returns: Mapping[str, float | None] = field(default_factory=dict)
    """The whole episode's, by agent; None: unscored. Those left out are not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCase:
    """What the tests need to know of an adapter."""

    name: str
    target: str
    """As in the settings of env_host: `module:Class` or `module:function(literals)`."""
    endings: Sequence[Ending]
    """At least one; the first is what seeds, duplicates and order are tried with."""
    crash: str
    """Target of an environment of the same library whose first step raises."""
    path: tuple[Path, ...] = (WORLDS,)
    options: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    crash_says: str | Action = "crash"
    """What the agents say to the environment of `crash`."""
    draws: bool = True
    """Other seeds give other episodes."""
    deterministic: bool = True
    """The same seed gives the same episode."""
    masks: bool = False
    """Legal actions are listed on every turn."""
    order: Sequence[tuple[str, ...]] = (("agent",),)
    """Whose moves are pending on the first turns of the first ending."""
    python: Callable[[], Path] | None = None
    """The interpreter of a virtual environment of its own; the case is then played on env_host only."""


@dataclass(slots=True)
class Episode:
    """An episode and what was seen of it."""

    session: EnvironmentSession
    play: Play
    twice: bool = False
    """Send each step twice."""
    pending: Observations = field(default_factory=dict)
    first: Observations = field(default_factory=dict)
    steps: list[JointStep] = field(default_factory=list)
    moved: list[tuple[str, ...]] = field(default_factory=list)
    result: JointResult | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(3))

    async def begin(self) -> None:
        self.first = self.pending = await self.session.begin_all()

    async def advance(self) -> bool:
        """A turn; False once the episode is over and finalized."""
        if self.result is not None:
            return False
        turn = len(self.steps) + 1
        said = self.play(turn, self.pending, self.rng)
        actions = {name: each if isinstance(each, Action) else Action(each) for name, each in said.items()}
        step = await self.session.step_all(actions, turn)
        if self.twice:
            assert await self.session.step_all(actions, turn) == step
        self.moved.append(tuple(actions))
        self.steps.append(step)
        self.pending = step.observations
        if step.done:
            self.result = await self.session.finalize_all()
        return True

    @property
    def seen(self) -> tuple[Any, ...]:
        """All that an agent or a trainer saw of it."""
        return self.first, tuple(self.steps), self.result

    def sums(self) -> dict[str, float | None]:
        """The rewards of its steps, added up for each agent."""
        sums: dict[str, RewardSum] = {}
        for step in self.steps:
            for name, reward in step.rewards.items():
                sums.setdefault(name, RewardSum()).add(reward)
        return {name: each.total.value for name, each in sums.items()}


async def played(
    case: AdapterCase,
    source: EnvironmentSource,
    *,
    seed: int = SEED,
    ending: int = 0,
    twice: bool = False,
    turns: int = 1000,
) -> Episode:
    """An episode that was played to its end, or for so many turns."""
    episode = await opened(case, source, seed=seed, ending=ending, twice=twice)
    for _ in range(turns):
        if not await episode.advance():
            break
    else:
        assert turns < 1000, f"{case.name} did not end in {turns} turns"
    await episode.session.close()
    return episode


async def opened(
    case: AdapterCase, source: EnvironmentSource, *, seed: int = SEED, ending: int = 0, twice: bool = False
) -> Episode:
    """An episode that has begun."""
    (session,) = await source.open_group(task=case.task, seed=seed, size=1)
    episode = Episode(session, case.endings[ending].play, twice)
    await episode.begin()
    return episode
