"""Hundreds of episodes at once, and never more than asked for."""

import asyncio
from typing import Any

import pytest
from client.tests.doubles.cluster import World
from client.tests.doubles.trainer import abort
from hypothesis import given, settings
from hypothesis import strategies as st

import opentinker as ot
from opentinker import errors
from opentinker.rollout.seats import MAX_EPISODES, Seats
from opentinkerapi.runtime.reasons import Reason

EVEN = ot.single_turn(
    [{"prompt": f"Number {n}: say an even one."} for n in range(600)],
    reward=lambda answer, task: float(answer.isdigit() and int(answer) % 2 == 0),
    name="even",
)


class Gate:
    """Holds requests back until so many are there, and notes how many were there at most."""

    def __init__(self, opens_at: int) -> None:
        self._opens_at = opens_at
        self._open = asyncio.Event()
        self.now = self.most = 0

    async def __call__(self, request: Any, context: Any) -> None:
        self.now += request.n
        self.most = max(self.most, self.now)
        if self.now >= self._opens_at:
            self._open.set()
        try:
            await asyncio.wait_for(self._open.wait(), 30)
        finally:
            self.now -= request.n


@pytest.fixture
def policy(doubles: World) -> ot.Policy:
    return doubles.cluster.create_policy("tiny").result()


@pytest.mark.parametrize(("options", "most"), [({}, MAX_EPISODES), ({"concurrency": 40}, 40)])
def test_run_keeps_so_many_episodes_in_flight(
    doubles: World, policy: ot.Policy, options: dict[str, int], most: int
) -> None:
    gate = doubles.inference.before = Gate(most)
    played = ot.run(policy, EVEN, episodes=600, split="train", **options)
    assert (played.episodes, played.excluded) == (600, 0)
    assert gate.most == most


def test_evaluate_fills_its_seats_with_groups(doubles: World, policy: ot.Policy) -> None:
    gate = doubles.inference.before = Gate(64)
    result = ot.evaluate(policy, EVEN, tasks=40, samples=8, split="train", concurrency=64)
    assert (result.tasks, gate.most) == (40, 64)


def test_what_is_not_kept_changes_no_number(doubles: World, policy: ot.Policy) -> None:
    kept = ot.evaluate(policy, EVEN, tasks=20, samples=2, split="train")
    light = ot.evaluate(policy, EVEN, tasks=20, samples=2, split="train", keep=False)
    assert light.metrics().items() >= {k: v for k, v in kept.metrics().items() if "timing" not in k}.items()
    trajectories = [each for group in light.groups for each in group.trajectories]
    assert not any(each.segments or each.messages for each in trajectories)
    assert [each.reward for each in trajectories] == [
        each.reward for group in kept.groups for each in group.trajectories
    ]
    assert [turn.text for each in trajectories for turn in each.turns] == [""] * 40


def test_a_fault_of_the_caller_ends_it_at_once(doubles: World, policy: ot.Policy) -> None:
    seen = 0

    async def refuse(request: Any, context: Any) -> None:
        nonlocal seen
        seen += 1
        await abort(context, Reason.PROMPT_TOO_LONG, "the prompt has 9 tokens, the context holds 8")

    doubles.inference.before = refuse
    with pytest.raises(errors.PromptTooLong):
        ot.run(policy, EVEN, episodes=600, split="train", concurrency=8)
    assert seen < 50


@pytest.mark.parametrize("concurrency", [0, -1])
def test_no_seats_are_refused_by_name(policy: ot.Policy, concurrency: int) -> None:
    with pytest.raises(errors.InvalidArgument, match="concurrency") as refused:
        ot.run(policy, EVEN, concurrency=concurrency)
    assert refused.value.field == "concurrency"


async def test_a_slow_episode_holds_only_its_own_seat() -> None:
    seats = Seats(8)
    await seats.take(4)
    await seats.take(4)
    waiting = asyncio.ensure_future(seats.take(4))
    for _ in range(3):
        seats.leave()
    await asyncio.sleep(0)
    assert not waiting.done()
    seats.leave()
    await waiting
    assert seats.taken == 8


async def test_a_group_larger_than_the_room_plays_alone() -> None:
    seats = Seats(4)
    await seats.take(1)
    large = asyncio.ensure_future(seats.take(10))
    small = asyncio.ensure_future(seats.take(1))
    await asyncio.sleep(0)
    assert not large.done()
    seats.leave()
    await large
    assert (seats.taken, small.done()) == (10, False)
    for _ in range(10):
        seats.leave()
    await small


@settings(max_examples=60, deadline=None)
@given(total=st.integers(1, 12), sizes=st.lists(st.integers(1, 6), max_size=12), random=st.randoms())
def test_seats_are_kept_and_everyone_gets_some(total: int, sizes: list[int], random: Any) -> None:
    async def group(seats: Seats, size: int) -> None:
        await seats.take(size)
        assert seats.taken <= max(total, size)
        for _ in range(size):
            await asyncio.sleep(random.choice([0, 0, 0.0001]))
            seats.leave()

    async def play() -> None:
        seats = Seats(total)
        async with asyncio.timeout(30):
            await asyncio.gather(*(group(seats, size) for size in sizes))
        assert seats.taken == 0

    asyncio.run(play())
