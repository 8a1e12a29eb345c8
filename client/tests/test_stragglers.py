"""Groups that take long: who waits for them, and that they keep their share of the data."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from client.tests.doubles.cluster import World

import opentinker as ot
from opentinker import errors

SLOW_S = 0.6
SLOW = 5
"""One of so many tasks is slow."""


class Mixed(ot.Environment):
    """One turn; every fifth task's step takes long."""

    def tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"number": number} for number in range(40)]

    async def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        self.number = task["number"]
        return ot.Observation(f"Say a number ({self.number}).")

    async def step(self, action: ot.Action) -> ot.StepResult:
        if self.number % SLOW == 0:
            await asyncio.sleep(SLOW_S)
        return ot.StepResult(reward=float(int(action.text) % 2), terminated=True)


def batches(doubles: World, count: int, stragglers: Any, **options: Any) -> tuple[list[ot.Batch], float]:
    policy = doubles.cluster.create_policy("tiny").result()
    env = options.pop("env", Mixed)

    async def play() -> list[ot.Batch]:
        rollouts = ot.rollouts(policy, env, groups=8, group_size=2, stragglers=stragglers, **options)
        played = [await anext(rollouts) for _ in range(count)]
        await rollouts._policy.portal.bridge(rollouts.close())
        return played

    started = time.monotonic()
    return asyncio.run(play()), time.monotonic() - started


def ordinals(batch: ot.Batch) -> list[int]:
    return [group.ordinal for group in batch.groups]


def test_waiting_for_all_waits_for_all(doubles: World) -> None:
    played, _ = batches(doubles, 3, ot.WaitAll())
    assert [ordinals(batch) for batch in played] == [list(range(8 * i, 8 * i + 8)) for i in range(3)]


def test_late_groups_are_in_a_later_batch_the_oldest_first(doubles: World) -> None:
    waited, waited_s = batches(doubles, 8, ot.WaitAll())
    played, played_s = batches(doubles, 8, ot.MinViable(deadline_s=0.1, patience=20))
    assert played_s < 0.6 * waited_s
    for batch in played:
        assert ordinals(batch) == sorted(ordinals(batch))
    handed = [number for batch in played for number in ordinals(batch)]
    assert len(handed) == len(set(handed))
    # All fast groups are there, in time; slow ones come later, and none is lost but those still under way.
    slow = {group.ordinal for batch in played for group in batch.groups if group.task["number"] % SLOW == 0}
    assert slow
    late = [o for index, batch in enumerate(played) for o in ordinals(batch) if o // 8 < index]
    assert set(late) == slow
    missing = set(range(64)) - set(handed)
    assert all(ordinal >= 64 - 8 * (int(SLOW_S / 0.1) + 3) for ordinal in missing)
    # Nothing was changed in them: rewards are those of waiting.
    rewards = {group.ordinal: group.rewards for batch in waited for group in batch.groups}
    assert all(group.rewards == rewards[group.ordinal] for batch in played for group in batch.groups)
    assert all(len(group.rewards) == 2 for batch in played for group in batch.groups)


def test_slow_tasks_keep_their_share(doubles: World) -> None:
    played, _ = batches(doubles, 15, ot.MinViable(deadline_s=0.15, patience=2), concurrency=64)
    kinds = Counter(group.task["number"] % SLOW == 0 for batch in played for group in batch.groups)
    assert kinds[True] / sum(kinds.values()) == pytest.approx(1 / SLOW, abs=0.04)
    for index, batch in enumerate(played):
        assert all(index - ordinal // 8 <= 2 for ordinal in ordinals(batch))  # patience


def test_a_late_group_with_enough_members_is_closed(doubles: World) -> None:
    turns: Counter[int] = Counter()

    class Uneven(Mixed):
        async def step(self, action: ot.Action) -> ot.StepResult:
            turns[self.number] += 1
            if turns[self.number] == 2:  # the second member of each group
                await asyncio.sleep(30)
            return ot.StepResult(reward=1.0, terminated=True)

    (batch,), seconds = batches(doubles, 1, ot.MinViable(k=1, deadline_s=0.3), env=Uneven)
    assert seconds < 10
    assert len(batch.groups) == 8
    for group in batch.groups:
        reasons = Counter(each.end_reason for each in group.trajectories)
        assert reasons == {ot.EndReason.TERMINATED: 1, ot.EndReason.EPISODE_TIMEOUT: 1}
        assert group.rewards == [1.0]


def test_what_a_late_group_raises_is_raised(doubles: World) -> None:
    class Wrong(Mixed):
        async def step(self, action: ot.Action) -> ot.StepResult:
            if self.number % SLOW == 0:
                await asyncio.sleep(0.3)
                array = ot.environments.Array("uint8", (1,), b"x")
                return ot.StepResult(ot.Observation(array))
            return ot.StepResult(reward=1.0, terminated=True)

    with pytest.raises(errors.UnsupportedOption, match="array"):
        batches(doubles, 6, ot.MinViable(deadline_s=0.05), env=Wrong)


def test_fit_goes_on_without_them(doubles: World, tmp_path: Path) -> None:
    result = ot.fit(
        Mixed,
        "tiny",
        steps=4,
        groups_per_step=8,
        algorithm=ot.GRPO(group_size=2),
        stragglers=ot.MinViable(deadline_s=0.1),
        run_dir=tmp_path,
    )
    assert len(result.metrics) == 4
    assert max(row["staleness/max"] for row in result.metrics) >= 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"stragglers": ot.MinViable(k=9)}, "stragglers.k"),
        ({"stragglers": ot.MinViable(), "tuning": ot.Full()}, "stragglers"),
        ({"stragglers": "min_viable"}, "stragglers"),
    ],
)
def test_policies_that_cannot_be_kept_are_refused(
    doubles: World, tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        ot.fit(Mixed, "tiny", run_dir=tmp_path, **options)
    assert caught.value.field == field
    assert not doubles.scheduler.jobs


@pytest.mark.parametrize("options", [{"k": 0}, {"deadline_s": 0}, {"patience": 0}])
def test_numbers_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        ot.MinViable(**options)
    assert caught.value.field == f"stragglers.{next(iter(options))}"
