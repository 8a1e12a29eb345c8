"""The front on a fake engine and an object store that fails on demand."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from services.trainer.tests.builders import sample
from services.trainer.tests.server.fakes import FakeEngine, FlakyStore
from services.trainer.tests.server.harness import DONE, FAILED, Client, pb, refused

from opentinker_kit.events import NullEventBus
from opentinker_kit.testing import wait_until
from opentinker_trainer.bootstrap import TrainerServer
from opentinker_trainer.settings import TrainerSettings
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import OpenTinkerError
from opentinkerapi.runtime.reasons import Reason

ROWS = [sample(4, 3, 1)]


class World:
    """What outlives a trainer: its objects and its disk. And what its engines are told to do."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.objects = FlakyStore()
        self.interfere: Callable[[str], None] = lambda _: None
        self.slices_of: Callable[[int], int] = lambda _samples: 1
        self.engines: list[FakeEngine] = []

    def make_engine(self) -> FakeEngine:
        engine = FakeEngine(lambda what: self.interfere(what), lambda samples: self.slices_of(samples))
        self.engines.append(engine)
        return self.engines[-1]

    @asynccontextmanager
    async def trainer(self, **options: int) -> AsyncIterator[Client]:
        """A trainer from its start to a death without any farewell."""
        settings = TrainerSettings(
            base_model="tiny", engine="noop", state_dir=self.directory / "state", **options
        )
        server = TrainerServer(
            settings, objects=self.objects, bus=NullEventBus(), make_engine=self.make_engine
        )
        await server.start()
        await wait_until(lambda: server.admission.limits is not None)
        try:
            async with open_channel(server.server.address) as channel:
                yield Client(channel)
        finally:
            for policy in server.holdings:
                policy.close(RuntimeError("dead"))  # type: ignore[arg-type]
            server.trainer.save_all = nothing  # type: ignore[method-assign]
            await server.server.drain()
            await server.run()

    def manifests(self, part: str) -> list[str]:
        return sorted(k for k in self.objects._objects if f"/{part}/" in k and k.endswith("/manifest.json"))


async def nothing() -> None:
    return None


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def learn(client: Client) -> None:
    operation = await client.forward_backward(ROWS)
    await client.done(await client.step([operation.seq]))


async def test_a_replayed_publish_publishes_nothing(world: World) -> None:
    async with world.trainer() as client:
        await client.create()
        await learn(client)
        first = (await client.done(await client.publish())).publish_weights.version
    before = {key: world.objects._objects[key] for key in world.manifests("versions")}
    async with world.trainer() as again:
        again.policy, again.seq = client.policy, client.seq
        assert (await again.result(3)).publish_weights.version.sha256 == first.sha256
    assert {key: world.objects._objects[key] for key in world.manifests("versions")} == before


async def test_a_replay_that_diverged_becomes_the_next_version(world: World) -> None:
    async with world.trainer() as client:
        await client.create()
        await learn(client)
        await client.done(await client.publish())
    # The replaying engine does something else.
    original = FakeEngine.advance

    async def other(self, policy):  # type: ignore[no-untyped-def]
        self.history[policy].append("noise")
        return await original(self, policy)

    FakeEngine.advance = other  # type: ignore[method-assign]
    try:
        async with world.trainer() as again:
            again.policy, again.seq = client.policy, client.seq
            assert (await again.result(3)).publish_weights.version.version == 2
            assert (await again.done(await again.publish())).publish_weights.version.version == 3
    finally:
        FakeEngine.advance = original  # type: ignore[method-assign]
    assert len(world.manifests("versions")) == 4


async def test_an_operation_that_cannot_be_logged_has_not_happened(world: World) -> None:
    async with world.trainer() as client:
        await client.create()
        world.objects.away = lambda key: "/ops/" in key
        error = await refused(client.forward_backward(ROWS))
        assert error.reason == Reason.STORAGE_UNAVAILABLE
        world.objects.away = lambda _: False
        await client.forward_backward(ROWS, header=client.header(1, "new"))
        assert (await client.result(1)).state == DONE


async def test_publishing_waits_while_the_store_is_away(world: World) -> None:
    async with world.trainer() as client:
        await client.create()
        await learn(client)
        world.objects.away = lambda key: "/versions/" in key
        operation = await client.publish()
        await asyncio.sleep(0.3)
        world.objects.away = lambda _: False
        version = (await client.done(operation)).publish_weights.version
        assert version.version == 1
        manifest = json.loads(await world.objects.get(version.manifest_key))
        uploaded = f"{version.name}/{manifest['files'][0]['name']}"
        await wait_until(lambda: uploaded in world.objects._objects, 5)


async def test_crashes_anywhere_leave_one_history(world: World) -> None:
    """The engine dies at each call in turn, with recovery checkpoints in between."""
    expected: list[str] = []
    for victim in [None, *range(2, 16)]:
        calls = 0

        def interfere(_what: str, victim: int | None = victim) -> None:
            nonlocal calls
            calls += 1
            if calls == victim:
                raise ConnectionError

        world.interfere = interfere
        async with world.trainer(recovery_every_steps=2) as client:
            # The first two calls make the policy; a crash there is the caller's to repeat.
            calls = 0
            await client.create(f"victim {victim}")
            calls = 1
            for _ in range(3):
                await learn(client)
            await client.done(await client.publish())
            await client.done(await client.save())
            history = world.engines[-1].history[client.policy]
            assert (await client.call("GetPolicy", pb.GetPolicyRequest(policy=client.policy))).step == 3
        expected = expected or history
        assert history == expected, victim


async def test_the_log_is_cut_once_it_is_recovered_and_acknowledged(world: World) -> None:
    async with world.trainer(recovery_every_steps=1) as client:
        await client.create()
        await learn(client)
        await learn(client)
        await client.done(await client.forward(ROWS))
        assert len([k for k in world.objects._objects if "/ops/" in k]) == 5
        await client.forward_backward(ROWS, header=client.header(acked=5))
        await client.done_seq(6)
        await wait_until(lambda: len([k for k in world.objects._objects if "/ops/" in k]) == 2, 5)
        assert len(world.manifests("recovery")) == 1
    async with world.trainer() as again:
        again.policy, again.seq = client.policy, 6
        await again.done(await again.step([6]))
        assert (await again.result(7)).optim_step.step == 3


async def test_a_damaged_recovery_checkpoint_is_not_taken_for_none(world: World) -> None:
    """What the log alone can give back is given back; where it was cut, the policy is refused, not reset."""
    async with world.trainer(recovery_every_steps=1) as client:
        await client.create()
        await learn(client)
        await wait_until(lambda: bool(world.manifests("recovery")), 5)
    damaged = next(k for k in world.objects._objects if "/recovery/" in k and k.endswith("/weights"))
    await world.objects.put(damaged, b"rot")
    async with world.trainer() as again:
        again.policy = client.policy
        assert (await again.result(2)).optim_step.step == 1
    await world.objects.delete(f"{client.policy}/ops/{1:012d}")
    async with world.trainer() as third:
        third.policy = client.policy
        error = await refused(third.call("GetPolicy", pb.GetPolicyRequest(policy=client.policy)))
        assert error.reason == Reason.POLICY_NOT_FOUND
    assert await world.objects.head(f"{client.policy}/ops/{2:012d}") is not None


async def test_a_failing_operation_fails_alone(world: World) -> None:
    """A fault in the engine's code is an error with an id; its text stays in the log."""

    def interfere(what: str) -> None:
        if what == "forward":
            raise RuntimeError("secret detail")

    world.interfere = interfere
    async with world.trainer() as client:
        await client.create()
        ended = await client.result((await client.forward(ROWS)).seq)
        assert ended.state == FAILED
        assert "secret" not in ended.error.message
        await learn(client)


async def test_what_a_policy_was_made_from_is_not_needed_again(world: World) -> None:
    async with world.trainer() as client:
        await client.create("first")
        await learn(client)
        saved = (await client.done(await client.save())).save_checkpoint.checkpoint.name
        await client.create("second", from_checkpoint=saved)
        assert [key for key in world.manifests("recovery") if client.policy in key]
    forget(world, saved)
    async with world.trainer() as again:
        again.policy, again.seq = client.policy, client.seq
        await wait_until(lambda: held(again), 5)
        await learn(again)
        assert (await again.result(2)).optim_step.step == 2
        assert (await again.call("GetPolicy", pb.GetPolicyRequest(policy=again.policy))).step == 2


async def test_a_restored_checkpoint_is_not_needed_again(world: World) -> None:
    async with world.trainer() as client:
        await client.create()
        await learn(client)
        saved = (await client.done(await client.save())).save_checkpoint.checkpoint.name
        await learn(client)
        restored = await client.done(await client.restore(saved))
        await wait_until(lambda: f"/recovery/{restored.seq:012d}/" in str(world.manifests("recovery")), 5)
        history = world.engines[-1].history[client.policy]
    forget(world, saved)
    async with world.trainer() as again:
        again.policy, again.seq = client.policy, client.seq
        await wait_until(lambda: held(again), 5)
        assert world.engines[-1].history[client.policy] == history
        await learn(again)


async def test_whole_models_are_not_published_faster_than_they_are_stored(world: World) -> None:
    async with world.trainer() as client:
        await client.create(tuning=policy_pb2.Tuning(full=policy_pb2.FullTuning()))
        (first,) = world.manifests("versions")
        assert json.loads(await world.objects.get(first))["kind"] == "base"
        world.objects.away = lambda key: "/versions/" in key and key.endswith("/weights")
        for _ in range(2):
            await learn(client)
            await client.done(await client.publish())
        third = await client.publish()
        await asyncio.sleep(0.3)
        request = pb.GetOperationRequest(policy=client.policy, seq=third.seq)
        assert (await client.call("GetOperation", request)).operation.state not in (DONE, FAILED)
        world.objects.away = lambda _: False
        assert (await client.done(third)).publish_weights.version.version == 3


async def held(client: Client) -> bool:
    try:
        await client.call("GetPolicy", pb.GetPolicyRequest(policy=client.policy))
    except OpenTinkerError:
        return False
    return True


def forget(world: World, prefix: str) -> None:
    """What the scheduler does to a checkpoint that is deleted."""
    for key in [key for key in world.objects._objects if key.startswith(f"{prefix}/")]:
        del world.objects._objects[key]
