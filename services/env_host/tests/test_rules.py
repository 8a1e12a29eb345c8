"""The host's rules under random calls and random deaths of workers, on fake workers and a clock by hand.

Model: an episode's answers are a function of its actions alone, whatever died on the way.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_env_host.domain.episode import Recipe
from opentinker_env_host.domain.host import EnvironmentHost, HostLimits
from opentinker_env_host.domain.pool import PoolLimits, WorkerPool
from opentinker_env_host.ports import EnvironmentFacts, Reply, WorkerLost
from opentinker_env_host.wire import begin_to_proto
from opentinker_kit.clock import ManualClock
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

FACTS = EnvironmentFacts("", "1", 0, True, ())
TTL_S = 100.0


def move(add: int) -> dict[str, Any]:
    """The action of the only agent."""
    return {"agents": {"agent": {"add": add}}}


class FakeWorker:
    """Plays sums in memory: each step adds its action; above 100 the episode ends."""

    def __init__(self, number: int) -> None:
        self.name = f"fake-{number}"
        self.facts = FACTS
        self._sums: dict[str, int] = {}
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    async def call(self, operation: str, timeout_s: float, **fields: Any) -> Reply:
        if not self.alive:
            raise WorkerLost("dead", suspect=False)
        await asyncio.sleep(0)
        if not self.alive:
            raise WorkerLost("died", suspect=False)
        name = fields.get("episode", "")
        if operation == "begin":
            self._sums[name] = fields["seed"]
        if operation == "step":
            self._sums[name] += fields["action"]["agents"]["agent"]["add"]
        total = self._sums.get(name, 0)
        answer = {"observations": {"agent": {}}, "sum": total, "terminated": total > 100, "truncated": False}
        return Reply(answer, (), f"{operation in ('begin', 'step')}{total}", 0.0)

    def kill(self, why: str) -> None:
        if self.alive:
            self._ended.set_result(why)

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    def resident_bytes(self) -> int:
        return 0


class FakeLauncher:
    """Keeps the workers it started."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []

    async def start(self) -> FakeWorker:
        self.workers.append(FakeWorker(len(self.workers)))
        return self.workers[-1]

    def kill_one(self, index: int) -> None:
        living = [worker for worker in self.workers if worker.alive]
        if living:
            living[index % len(living)].kill("the test")


class Failures:
    """Counts what was announced."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    async def episode_failed(self, episode: str, environment: str, reason: str) -> None:
        self.reasons.append(reason)


@contextlib.contextmanager
def refused(reason: Reason) -> Iterator[None]:
    """The body must raise a ServiceError with this reason."""
    with pytest.raises(ServiceError) as raised:
        yield
    assert raised.value.reason is reason


calls = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(0, 2), st.integers(1, 60)),
        st.tuples(st.just("again"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("other"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("skip"), st.integers(0, 2), st.integers(2, 5)),
        st.tuples(st.just("begin"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("kill"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("kill during"), st.integers(0, 2), st.integers(1, 60)),
    ),
    max_size=40,
)


@given(calls)
@settings(max_examples=150, deadline=None)
def test_answers_depend_on_the_actions_alone(script: list[tuple[str, int, int]]) -> None:
    asyncio.run(play(script))


async def play(script: list[tuple[str, int, int]]) -> None:
    launcher = FakeLauncher()
    limits = PoolLimits(1, 2, 2, 1000, 1 << 40)
    host = EnvironmentHost(
        {"sums": WorkerPool("sums", launcher, limits)}, HostLimits(10, 10, 1000), ManualClock(), Failures()
    )
    await host.start()
    group = await host.open_group("r", Recipe("sums", 7, {}, {}, TTL_S, 1.0), 3)
    actions: list[list[int]] = [[], [], []]
    begun = [False] * 3

    async def step(member: int, add: int) -> None:
        name, done = group.episodes[member], actions[member]
        ended = 7 + sum(done) > 100
        call: Callable[[], Any] = lambda: host.step(name, len(done) + 1, str(add).encode(), move(add))  # noqa: E731
        if not begun[member] or ended:
            with refused(Reason.INVALID_STATE):
                await call()
            return
        answered = await call()
        done.append(add)
        assert answered.reply.answer["sum"] == 7 + sum(done)

    for verb, index, number in script:
        match verb:
            case "step":
                await step(index, number)
            case "kill":
                launcher.kill_one(index)
            case "kill during":
                stepping = asyncio.create_task(step(index, number))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                launcher.kill_one(index)
                await stepping
            case "begin":
                assert (await host.begin(group.episodes[index])).answer["sum"] == 7
                begun[index] = True
            case "again" if actions[index]:
                last = actions[index][-1]
                answered = await host.step(
                    group.episodes[index], len(actions[index]), str(last).encode(), move(last)
                )
                assert answered.reply.answer["sum"] == 7 + sum(actions[index])
            case "other" if actions[index]:
                with refused(Reason.SEQ_REUSED):
                    await host.step(group.episodes[index], len(actions[index]), b"other", move(1))
            case "skip":
                with refused(Reason.STEP_OUT_OF_ORDER):
                    await host.step(group.episodes[index], len(actions[index]) + number, b"1", move(1))
    await host.close(group.episodes)
    assert host.open_episodes == 0
    with refused(Reason.EPISODE_NOT_FOUND):
        await host.begin(group.episodes[0])
    await host.stop()
    assert not any(worker.alive for worker in launcher.workers)


async def test_a_lease_lasts_its_time_from_the_last_sign_of_life() -> None:
    clock, failures = ManualClock(), Failures()
    pool = WorkerPool("sums", FakeLauncher(), PoolLimits(1, 2, 2, 1000, 1 << 40))
    host = EnvironmentHost({"sums": pool}, HostLimits(10, 10, 1000), clock, failures)
    await host.start()
    renewed, played, left = (await host.open_group("r", Recipe("sums", 7, {}, {}, TTL_S, 1.0), 3)).episodes
    await host.begin(played)
    await clock.advance(TTL_S - 1)
    await host.reap()
    assert host.open_episodes == 3
    host.renew([renewed])
    await host.step(played, 1, b"", move(1))
    await clock.advance(2)
    await host.reap()
    assert host.renew([renewed, played, left])[0] == [left]
    assert failures.reasons == ["LEASE_EXPIRED"]
    await clock.advance(TTL_S + 1)
    await host.reap()
    assert host.open_episodes == 0
    await host.stop()


async def test_a_project_has_no_more_episodes_than_its_quota() -> None:
    pool = WorkerPool("sums", FakeLauncher(), PoolLimits(1, 2, 2, 1000, 1 << 40))
    host = EnvironmentHost(
        {"sums": pool}, HostLimits(20, 10, 1000, project_episodes=3), ManualClock(), Failures()
    )
    await host.start()
    recipe = Recipe("sums", 7, {}, {}, TTL_S, 1.0)
    first = await host.open_group("r1", recipe, 2, "jobs/a", "p")
    with pytest.raises(ServiceError, match="2 of the 3 episodes") as raised:
        await host.open_group("r2", recipe, 2, "jobs/b", "p")
    assert raised.value.reason is Reason.QUOTA_EXCEEDED
    assert raised.value.quota[0][0] == "projects/p"
    await host.open_group("r3", recipe, 3, "jobs/c", "other")
    # Without a project nobody's quota is asked for; the host's own limit is.
    await host.open_group("r4", recipe, 4)
    await host.close([first.episodes[0], "episodes/none"], "jobs/a")
    await host.open_group("r2", recipe, 2, "jobs/b", "p")
    with refused(Reason.QUOTA_EXCEEDED):
        await host.open_group("r5", recipe, 1, "jobs/a", "p")
    await host.stop()


async def test_request_ids_are_kept_for_an_hour() -> None:
    clock = ManualClock()
    pool = WorkerPool("sums", FakeLauncher(), PoolLimits(1, 2, 2, 1000, 1 << 40))
    host = EnvironmentHost({"sums": pool}, HostLimits(10, 10, 1000), clock, Failures())
    await host.start()
    recipe = Recipe("sums", 7, {}, {}, TTL_S, 1.0)
    first = await host.open_group("r", recipe, 1)
    await clock.advance(3500)
    assert await host.open_group("r", recipe, 1) == first
    await clock.advance(200)
    assert await host.open_group("r", recipe, 1) != first
    await host.stop()


def test_an_image_too_large_to_travel_ends_its_episode_by_name() -> None:
    def begun(size: int) -> Reply:
        content = [{"image": 0, "media_type": "image/png"}]
        return Reply({"observations": {"agent": {"content": content}}}, [bytes(size)], "", 0.0)

    (pending,) = begin_to_proto(begun(2 * 1024 * 1024)).pending
    assert len(pending.observation.content.parts[0].image.inline) == 2 * 1024 * 1024
    with pytest.raises(ServiceError, match="bytes is over") as refused:
        begin_to_proto(begun(2 * 1024 * 1024 + 1))
    assert refused.value.reason is Reason.ENV_CRASHED
