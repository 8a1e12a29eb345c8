"""Which weights are resident: nothing is mixed, nobody starves, what fails is told to those who asked."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opentinker_inference.domain.residency import AdapterResidency, MergedResidency, Residency
from opentinker_inference.domain.versions import BASE, LocalWeights, ModelRef, policy_of
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason


def version(number: int, policy: str = "policies/p") -> ModelRef:
    return ModelRef(policy=policy, version=number)


class FakeEngine:
    """Knows what is loaded and that nothing changes under a running request."""

    def __init__(self, *, merged: bool, capacity: int = 3) -> None:
        self.loaded = {""}
        self.merged = merged
        self.capacity = capacity
        self.running: list[str] = []
        self.continuing: list[str] = []
        """Keys that those asked for who may go on under another."""
        self.loads: list[str] = []
        self.broken: set[str] = set()
        self.held: Counter[str] = Counter()
        self.unload_s = 0.0

    @contextlib.asynccontextmanager
    async def hold(self, ref: ModelRef) -> AsyncIterator[LocalWeights | None]:
        await asyncio.sleep(0)
        if ref.key in self.broken:
            raise ServiceError(Reason.VERSION_NOT_FOUND)
        self.held[ref.key] += 1
        try:
            yield None if ref.is_base else LocalWeights(Path(ref.key))
        finally:
            self.held[ref.key] -= 1

    async def load(self, key: str, weights: LocalWeights | None) -> float:
        await asyncio.sleep(0.001)
        assert self.held[key] > 0
        if self.merged:
            assert not self.running, "swapped under running requests"
            policies = {policy_of(k) for k in [key, *self.continuing]}
            assert len(policies) == 1, "went on under weights of another policy"
            self.loaded = {key}
        self.loaded.add(key)
        assert len(self.loaded - {""}) <= self.capacity
        self.loads.append(key)
        return 0.5

    async def unload(self, key: str) -> None:
        await asyncio.sleep(self.unload_s)
        assert key not in self.running
        self.loaded.discard(key)

    def residency(self) -> Residency:
        if self.merged:
            return MergedResidency(self.hold, self.load)
        return AdapterResidency(self.hold, self.load, self.unload, self.capacity)

    async def go_on(self, key: str, seconds: float) -> None:
        """Run where a swap may happen."""
        self.continuing.append(key)
        try:
            for _ in range(5):
                await asyncio.sleep(seconds / 5)
                assert {policy_of(key)} == {policy_of(loaded) for loaded in self.loaded}
        finally:
            self.continuing.remove(key)

    async def run(self, key: str, seconds: float) -> None:
        self.running.append(key)
        await asyncio.sleep(seconds)
        assert key in self.loaded
        if self.merged:
            assert set(self.running) == {key}
        self.running.remove(key)


@pytest.mark.parametrize("merged", [True, False])
async def test_random_requests_are_never_mixed_and_all_end(merged: bool) -> None:
    engine = FakeEngine(merged=merged)
    residency = engine.residency()
    chance = random.Random(1)
    refs = [BASE, *(version(n) for n in range(6))]

    async def one() -> None:
        await asyncio.sleep(chance.random() * 0.2)
        ref = chance.choice(refs)
        if chance.random() < 0.1:
            task = asyncio.create_task(use(ref))
            await asyncio.sleep(0.002)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await use(ref)

    async def use(ref: ModelRef) -> None:
        async with residency.use(ref) as key:
            assert key == ref.key
            try:
                await engine.run(key, chance.random() * 0.005)
            except asyncio.CancelledError:
                engine.running.remove(key)
                raise

    async with asyncio.timeout(30):
        await asyncio.gather(*(one() for _ in range(200)))
    assert residency.waiting() == 0
    assert all(users == 0 for _, users in residency.loaded())


async def test_a_version_that_is_wanted_again_while_it_makes_room() -> None:
    """It is forgotten first and loaded then, not the other way round (B80)."""
    engine = FakeEngine(merged=False, capacity=1)
    residency = engine.residency()
    engine.unload_s = 0.02

    async def one(ref: ModelRef) -> None:
        async with residency.use(ref) as key:
            await engine.run(key, 0.05)

    await one(version(1))
    second = asyncio.create_task(one(version(2)))
    await asyncio.sleep(0.005)
    async with asyncio.timeout(5):
        await asyncio.gather(one(version(1)), second)


async def test_merged_waiters_go_in_order_and_together() -> None:
    engine = FakeEngine(merged=True)
    residency = engine.residency()
    order: list[str] = []

    async def one(ref: ModelRef) -> None:
        async with residency.use(ref) as key:
            order.append(key)
            await engine.run(key, 0.1)

    tasks = [asyncio.create_task(one(BASE))]
    for ref in (version(1), BASE, version(2), version(1), BASE):
        await asyncio.sleep(0.001)
        tasks.append(asyncio.create_task(one(ref)))
    await asyncio.gather(*tasks)
    one_key, two_key = version(1).key, version(2).key
    assert order == ["", one_key, one_key, "", "", two_key]
    assert engine.loads == [one_key, "", two_key]


async def test_a_swap_happens_under_those_that_may_continue_and_waits_for_the_rest() -> None:
    engine = FakeEngine(merged=True)
    residency = engine.residency()
    done: list[str] = []

    async def one(name: str, ref: ModelRef, seconds: float, *, go_on: bool) -> None:
        async with residency.use(ref, may_continue=go_on) as key:
            assert key == ref.key
            await (engine.go_on if go_on else engine.run)(key, seconds)
        done.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(one("long", version(1), 0.2, go_on=True))
        await asyncio.sleep(0.01)
        await residency.load(version(2), may_continue=True)
        assert done == []
        assert engine.loaded == {version(2).key}
        group.create_task(one("pinned", version(2), 0.05, go_on=False))
        await asyncio.sleep(0.01)
        await residency.load(version(3), may_continue=True)
        assert done == ["pinned"]
        await residency.load(version(4))  # who asks wants the others to end first
        assert done == ["pinned", "long"]
        group.create_task(one("again", version(4), 0.05, go_on=True))
        await asyncio.sleep(0.01)
        await residency.load(BASE, may_continue=True)
        assert done[-1] == "again", "a request went on under the base model"
    assert engine.loads == [*(version(n).key for n in range(1, 5)), ""]


async def test_random_requests_some_of_which_may_continue() -> None:
    engine = FakeEngine(merged=True)
    residency = engine.residency()
    chance = random.Random(2)
    refs = [version(n) for n in range(5)]

    async def one() -> None:
        await asyncio.sleep(chance.random() * 0.2)
        ref, go_on = chance.choice(refs), chance.random() < 0.7
        async with residency.use(ref, may_continue=go_on) as key:
            await (engine.go_on if go_on else engine.run)(key, chance.random() * 0.02)

    async with asyncio.timeout(30):
        await asyncio.gather(*(one() for _ in range(200)))
    assert residency.waiting() == 0
    assert all(users == 0 for _, users in residency.loaded())


async def test_a_second_policy_is_refused_only_while_the_first_is_sampled() -> None:
    engine = FakeEngine(merged=True)
    residency = engine.residency()
    other = version(1, "policies/q")
    async with residency.use(version(1)):
        with pytest.raises(ServiceError) as caught:
            await residency.load(other)
        assert caught.value.reason is Reason.MERGED_ONE_VERSION
    assert await residency.load(other) == 0.5
    assert await residency.load(other) == 0.0


@pytest.mark.parametrize("merged", [True, False])
async def test_a_version_that_does_not_load_fails_its_requests_alone(merged: bool) -> None:
    engine = FakeEngine(merged=merged)
    residency = engine.residency()
    engine.broken.add(version(1).key)

    async def one(ref: ModelRef) -> str:
        async with residency.use(ref) as key:
            await engine.run(key, 0.005)
            return key

    results = await asyncio.gather(*(one(version(n)) for n in (0, 1, 2, 1)), return_exceptions=True)
    assert [isinstance(result, ServiceError) for result in results] == [False, True, False, True]
    engine.broken.clear()
    assert await one(version(1)) == version(1).key


async def test_after_a_restart_everything_is_loaded_again() -> None:
    for merged in (True, False):
        engine = FakeEngine(merged=merged)
        residency = engine.residency()
        await residency.load(version(1))
        engine.loaded = {""}
        residency.reset()
        async with residency.use(version(1)) as key:
            await engine.run(key, 0)
        assert engine.loads == [version(1).key] * 2


async def test_unload() -> None:
    engine = FakeEngine(merged=False)
    residency = engine.residency()
    await residency.load(version(1))
    await residency.unload(version(1))
    assert engine.loaded == {""}
    with pytest.raises(ServiceError) as caught:
        await residency.unload(version(1))
    assert caught.value.reason is Reason.VERSION_NOT_FOUND
