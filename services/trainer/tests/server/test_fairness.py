"""Several policies on one engine: turns by slices, each policy in its own order, nobody pays for another."""

import asyncio
import itertools
from pathlib import Path

import grpc
import pytest
from services.trainer.tests.builders import ragged_batch, sample
from services.trainer.tests.server.conftest import StartTrainer
from services.trainer.tests.server.harness import DONE, FAILED, Client, cross_entropy, message, pb, refused
from services.trainer.tests.server.test_faults import World

from opentinker_kit.testing import wait_until
from opentinkerapi.runtime.errors import OpenTinkerError
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.trainer.v1 import operation_pb2

LARGE = [sample(4, 3, seed) for seed in range(64)]
SMALL = [sample(4, 3, 1)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """One slice for each sample."""
    made = World(tmp_path)
    made.slices_of = lambda samples: samples
    return made


async def two_tenants(client: Client) -> tuple[Client, Client]:
    """Clients of two policies on the channel of one."""
    other = Client.__new__(Client)
    other.stub, other.policy, other.seq = client.stub, "", 0
    await client.create("large")
    await other.create("small")
    return client, other


async def test_a_small_operation_does_not_wait_for_a_large_one(world: World) -> None:
    """64 rows were queued first; the row of another tenant is through long before them."""
    async with world.trainer() as client:
        large, small = await two_tenants(client)
        await large.forward_backward(LARGE)
        await large.step([1])
        await wait_until(lambda: large.policy in world.engines[0].turns)
        await small.forward_backward(SMALL)
        assert (await small.result(1)).state == DONE
        state = (
            await large.call("GetOperation", pb.GetOperationRequest(policy=large.policy, seq=1))
        ).operation
        assert state.state == operation_pb2.OPERATION_STATE_RUNNING
        # Each policy's own operations keep their order: the step comes after the last slice.
        assert (await large.result(2)).state == DONE
        turns = world.engines[0].turns
        assert turns.count(large.policy) == 64
        assert turns.index(small.policy) < 60
        assert world.engines[0].history[large.policy][1:] == ["gradient of 64", "step"]


async def test_turns_go_round(world: World) -> None:
    """Two large operations alternate, slice by slice."""
    async with world.trainer() as client:
        large, small = await two_tenants(client)
        await asyncio.gather(large.forward_backward(LARGE), small.forward_backward(LARGE))
        await asyncio.gather(large.result(1), small.result(1))
        turns = world.engines[0].turns
        first = max(turns.index(large.policy), turns.index(small.policy))
        both = turns[first : turns.index(turns[first]) + 100]
        assert all(one != two for one, two in itertools.pairwise(both)), both


async def test_a_crash_is_held_against_the_slice_that_ran(world: World) -> None:
    """A policy whose third slice kills the engine is POISONED after two tries.

    The other one, in the middle of its own pass both times, is run again and not blamed.
    """
    victim = ""

    def interfere(_what: str) -> None:
        turns = world.engines[-1].turns
        if turns and turns[-1] == victim and turns.count(victim) % 64 == 3:
            turns.append("crash")
            raise ConnectionError

    world.interfere = interfere
    async with world.trainer() as client:
        large, small = await two_tenants(client)
        victim = large.policy
        await asyncio.gather(large.forward_backward(LARGE), small.forward_backward(LARGE[:40]))
        ended = await large.result(1)
        assert ended.state == FAILED
        assert "two crashes" in ended.error.message
        assert (await small.result(1)).state == DONE
        assert len(world.engines) == 3
        assert [engine.turns.count(small.policy) for engine in world.engines[:2]] != [0, 0]
        assert world.engines[-1].history[small.policy][1:] == ["gradient of 40"]
        poisoned = [key for key in world.objects._objects if "/poisoned/" in key]
        assert [key.partition("/poisoned/")[0] for key in poisoned] == [large.policy]
        # The poisoned seq is consumed, and its policy goes on.
        victim = ""
        await large.forward_backward(SMALL)
        assert (await large.done(await large.step([2]))).optim_step.step == 1


async def test_a_pass_that_is_cut_off_has_changed_nothing(world: World) -> None:
    """A fault in a slice fails the operation; what was accumulated before is as it was."""
    async with world.trainer() as client:
        await client.create()
        await client.done(await client.forward_backward(SMALL))

        def interfere(what: str) -> None:
            if what == "forward_backward" and len(world.engines[0].turns) == 10:
                raise RuntimeError("a fault")

        world.interfere = interfere
        assert (await client.result((await client.forward_backward(LARGE)).seq)).state == FAILED
        await client.done(await client.step([1]))
        assert world.engines[0].history[client.policy][1:] == ["gradient of 1", "step"]


async def test_incomplete_chunk_sets_count_against_the_quota(world: World) -> None:
    """Bodies that are half here take room; when their sender goes away they give it back."""
    row = message(sample(60, 60, 1))
    part = pb.ForwardBackwardRequest(chunk=pb.SampleChunk(index=0, samples=[row]))
    async with world.trainer(max_pending_bytes=int(1.5 * part.ByteSize())) as client:
        await client.create()
        start = pb.ForwardBackwardStart(
            header=client.header(1, "half"), chunk_count=2, losses=[cross_entropy()]
        )
        half = client.stub.ForwardBackward()
        await half.write(pb.ForwardBackwardRequest(start=start))
        await half.write(part)
        error = await refused(client.forward_backward([row], header=client.header(1, "other")))
        assert error.reason == Reason.QUOTA_EXCEEDED
        # What fits beside it gets through.
        assert (await client.done(await client.forward_backward(SMALL, header=client.header(1)))).seq == 1
        half.cancel()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await half

        async def has_room() -> bool:
            try:
                await client.forward_backward([row], header=client.header(2))
            except OpenTinkerError as error:
                return error.reason != Reason.QUOTA_EXCEEDED
            return True

        await wait_until(has_room, 5)
        assert (await client.result(2)).state == DONE


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_beside_others_a_policy_gets_the_bits_that_it_gets_alone(trainers: StartTrainer) -> None:
    """On the torch engine: 1 row of one tenant ends before 64 of another, and both weights are as alone."""
    process = trainers(slice_tokens=512)
    await process.start()
    heavy = [sample(30, 60, seed) for seed in range(64)]

    async def train(client: Client, rows: list) -> str:  # type: ignore[type-arg]
        for _ in range(2):
            operation = await client.forward_backward(rows)
            await client.step([operation.seq])
        ended = await client.done(await client.publish())
        return str(ended.publish_weights.version.sha256)

    async with process.client() as first, process.client() as second:
        model = process.settings["base_model"]
        alone = []
        for name, rows in (("a", heavy), ("b", ragged_batch()[:1])):
            await first.create(f"{name} alone", model=model)
            alone.append(await train(first, rows))
        await first.create("a", model=model)
        await second.create("b", model=model)
        large = asyncio.create_task(train(first, heavy))
        await wait_until(lambda: first.seq >= 1)
        small = await train(second, ragged_batch()[:1])
        assert not large.done()
        assert [await large, small] == alone
