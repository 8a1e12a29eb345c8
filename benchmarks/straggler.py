"""What a batch gains that goes on without late groups: `ot.MinViable` over waiting for all.

20 steps of 64 groups of 8, one turn each; 2 % of the tasks are slow, a step of theirs takes 5 s. The client's
own rollouts on an engine that answers after 0.3 s; an update takes 0.5 s. Cases: `time` (seconds of the 20
steps over those of waiting for all, with the groups and the slow ones of both beside it) and `share` (points
by which the share of slow tasks in the training data differs).
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.pairs import Options
from benchmarks.results import Result, interval_of_median, paired
from opentinker.environments import Action, Environment, LocalEnvironment, Observation, StepResult
from opentinker.rollout.rollouts import Rollouts
from opentinker.rollout.stragglers import MinViable, Stragglers, WaitAll
from opentinker.sampling.completion import Completion, StopReason

STEPS, GROUPS, GROUP_SIZE = 20, 64, 8
SLOW_EVERY, SLOW_S = 50, 5.0
ENGINE_S, UPDATE_S = 0.3, 0.5
DEADLINE_S = 0.6
MAX_PAIRS = 5
BASELINE = "waiting for all groups of each step"


class Mixed(Environment):
    """One turn; one of fifty tasks is slow."""

    def tasks(self, split: str) -> Sequence[dict[str, Any]]:
        return [{"number": number} for number in range(STEPS * GROUPS)]

    async def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        self._number = task["number"]
        return Observation("go")

    async def step(self, action: Action) -> StepResult:
        if self._number % SLOW_EVERY == 0:
            await asyncio.sleep(SLOW_S)
        return StepResult(reward=1.0, terminated=True)


class Engine:
    """Answers after a while."""

    async def sample(
        self, prompt: Sequence[int], *, n: int, seed: int | None, **_: Any
    ) -> AsyncGenerator[Completion, None]:
        await asyncio.sleep(ENGINE_S)
        for index in range(n):
            logprobs = np.zeros(2, np.float32)
            yield Completion(index, (1, 0), logprobs, StopReason.END, "x", seed=(seed or 0) + index)

    async def capabilities(self) -> Any:
        return SimpleNamespace(context_tokens=4096)

    def acknowledge(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept."""


class Bytes:
    """A tokenizer whose tokens are bytes."""

    eos_ids = (0,)
    images = None
    has_template = False

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


class Pretended:
    """A policy without a cluster."""

    def __init__(self) -> None:
        self.version = 0
        self.renderer = ""
        self.sampler = Engine()

    async def tokenizer(self) -> Bytes:
        return Bytes()


@dataclass(frozen=True, slots=True)
class Run:
    """What 20 steps came to."""

    seconds: float
    groups: int
    slow: int

    @property
    def share(self) -> float:
        """Of slow tasks in the training data, in points."""
        return 100.0 * self.slow / self.groups


async def train(stragglers: Stragglers) -> Run:
    """All steps."""
    policy: Any = Pretended()
    rollouts = Rollouts(
        policy,
        LocalEnvironment(Mixed, step_timeout_s=60.0),
        groups=GROUPS,
        group_size=GROUP_SIZE,
        concurrency=2 * GROUPS * GROUP_SIZE,
        stragglers=stragglers,
        keep=False,
    )
    started = time.monotonic()
    tasks = []
    for _ in range(STEPS):
        batch = await rollouts.next_batch(GROUPS)
        assert all(len(group.rewards) == GROUP_SIZE for group in batch.groups), "a group lost episodes"
        tasks += [group.task["number"] for group in batch.groups]
        await asyncio.sleep(UPDATE_S)
        policy.version += 1
    seconds = time.monotonic() - started
    await rollouts.close()
    assert len(set(tasks)) == len(tasks), "a group was handed out twice"
    return Run(seconds, len(tasks), sum(number % SLOW_EVERY == 0 for number in tasks))


def run(options: Options) -> Iterable[Result]:
    if unknown := options.cases - {"time", "share"}:
        raise SystemExit(f"unknown case {min(unknown)!r}")
    ours, theirs = [], []
    for _ in range(min(options.pairs, MAX_PAIRS)):
        ours.append(asyncio.run(train(MinViable(deadline_s=DEADLINE_S))))
        theirs.append(asyncio.run(train(WaitAll())))
    figures = {
        "ours_groups_and_slow": [[each.groups, each.slow] for each in ours],
        "baseline_groups_and_slow": [[each.groups, each.slow] for each in theirs],
    }
    if options.wants("time"):
        result = paired(
            "straggler",
            "time",
            [round(each.seconds, 3) for each in ours],
            [round(each.seconds, 3) for each in theirs],
            baseline=BASELINE,
            unit="s",
        )
        yield replace(result, raw={**result.raw, **figures})
    if options.wants("share"):
        points = [abs(mine.share - other.share) for mine, other in zip(ours, theirs, strict=True)]
        median, low, high = interval_of_median(points)
        raw = {
            "ours_points": [each.share for each in ours],
            "baseline_points": [each.share for each in theirs],
        }
        yield Result("straggler", "share", median, "lower", low, high, len(points), BASELINE, raw)
