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

SLOW_S = 0.5
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


def batches(
    doubles: World, count: int, stragglers: Any, *, before_last: asyncio.Event | None = None, **options: Any
) -> list[ot.Batch]:
    policy = doubles.cluster.create_policy("tiny").result()
    env = options.pop("env", Mixed)

    async def play() -> list[ot.Batch]:
        rollouts = ot.rollouts(policy, env, groups=8, group_size=2, stragglers=stragglers, **options)
        played = []
        for number in range(count):
            if before_last is not None and number == count - 1:
                before_last.set()
            played.append(await rollouts.next_batch(8))
        await rollouts.close()
        return played

    return doubles.portal.run(play())


def ordinals(batch: ot.Batch) -> list[int]:
    return [group.ordinal for group in batch.groups]


def test_waiting_for_all_waits_for_all(doubles: World) -> None:
    played = batches(doubles, 3, ot.WaitAll())
    assert [ordinals(batch) for batch in played] == [list(range(8 * i, 8 * i + 8)) for i in range(3)]


@pytest.mark.slow
def test_late_groups_are_in_a_later_batch_the_oldest_first(doubles: World) -> None:
    """Slow tasks end only when all batches but the last have been handed out."""
    released = asyncio.Event()

    class Waits(Mixed):
        async def step(self, action: ot.Action) -> ot.StepResult:
            if self.number % SLOW == 0:
                await released.wait()
            return ot.StepResult(reward=float(int(action.text) % 2), terminated=True)

    waited = batches(doubles, 4, ot.WaitAll())
    played = batches(doubles, 4, ot.MinViable(deadline_s=2.0, patience=20), env=Waits, before_last=released)
    slow = {g.ordinal for batch in waited for g in batch.groups if g.task["number"] % SLOW == 0}
    early = {ordinal for batch in played[:-1] for ordinal in ordinals(batch)}
    assert slow
    assert not early & slow
    # None is lost, none comes twice, nothing was changed in them.
    handed = [ordinal for batch in played for ordinal in ordinals(batch)]
    assert sorted(handed) == list(range(32))
    for batch in played:
        assert ordinals(batch) == sorted(ordinals(batch))
    rewards = {group.ordinal: group.rewards for batch in waited for group in batch.groups}
    for batch in played:
        assert all(group.rewards == rewards[group.ordinal] for group in batch.groups)


def test_a_batch_waits_for_groups_that_were_left_behind_often_enough(doubles: World) -> None:
    played = batches(doubles, 6, ot.MinViable(deadline_s=0.2, patience=1), concurrency=64)
    for index, batch in enumerate(played):
        assert all(index - ordinal // 8 <= 1 for ordinal in ordinals(batch))
    handed = [ordinal for batch in played for ordinal in ordinals(batch)]
    assert set(range(40)) <= set(handed)


def test_a_late_group_with_enough_members_is_closed(doubles: World) -> None:
    turns: Counter[int] = Counter()

    class Uneven(Mixed):
        async def step(self, action: ot.Action) -> ot.StepResult:
            turns[self.number] += 1
            if turns[self.number] == 2:  # the second member of each group
                await asyncio.sleep(30)
            return ot.StepResult(reward=1.0, terminated=True)

    started = time.monotonic()
    (batch,) = batches(doubles, 1, ot.MinViable(k=1, deadline_s=2.0), env=Uneven)
    assert time.monotonic() - started < 25  # not the 30 s that the others take
    assert batch.groups
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
    class Slower(Mixed):
        async def step(self, action: ot.Action) -> ot.StepResult:
            if self.number % SLOW == 0:
                await asyncio.sleep(60)
            return ot.StepResult(reward=float(int(action.text) % 2), terminated=True)

    result = ot.fit(
        Slower,
        "tiny",
        steps=4,
        groups_per_step=8,
        algorithm=ot.GRPO(group_size=2),
        stragglers=ot.MinViable(deadline_s=0.1),
        run_dir=tmp_path,
    )
    assert len(result.metrics) == 4
    assert 0 < sum(row["group/count"] for row in result.metrics) < 32  # without the slow ones


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
