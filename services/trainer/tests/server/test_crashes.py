"""Killing the engine and the server in the middle: the parameters end up bitwise the same."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from services.trainer.tests.builders import ragged_batch, sample
from services.trainer.tests.server.conftest import StartTrainer
from services.trainer.tests.server.harness import DONE, FAILED, Client, TrainerProcess, pb

from opentinker_kit.objects import S3ObjectStore
from opentinker_kit.settings import S3Settings
from opentinker_kit.testing import wait_until
from opentinkerapi.runtime.errors import OpenTinkerError
from opentinkerapi.runtime.reasons import Reason

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 5
HEAVY = [sample(40, 60, seed) for seed in range(32)]
"""A batch that keeps the engine busy for a while."""

Disturb = Callable[[TrainerProcess, Client, int], Awaitable[None]]


async def train(process: TrainerProcess, client: Client, policy: str, disturb: Disturb | None = None) -> str:
    """Some steps, published at the end; the digest of the weights."""
    await client.create(policy, model=process.settings["base_model"])
    for step in range(STEPS):
        for half in (ragged_batch()[:4], ragged_batch()[4:]):
            header = client.header()
            await again(process, client, lambda h=half, hd=header: client.forward_backward(h, header=hd))
        request = client.step_request([client.seq - 1, client.seq])
        if disturb is not None:
            await disturb(process, client, step)
        await again(process, client, lambda r=request: client.call("OptimStep", r))
    publish = pb.PublishWeightsRequest(header=client.header())
    await again(process, client, lambda: client.call("PublishWeights", publish))
    ended = await patient_result(process, client, client.seq)
    assert ended.state == DONE, ended.error.message
    described = await client.call("GetPolicy", pb.GetPolicyRequest(policy=client.policy))
    assert described.step == STEPS
    return str(ended.publish_weights.version.sha256)


async def again(process: TrainerProcess, client: Client, call: Callable[[], Awaitable[object]]) -> None:
    """Send a request until it is answered, as a client does whose server was away."""
    for _ in range(200):
        try:
            await call()
            return
        except OpenTinkerError as error:
            if error.code.name != "UNAVAILABLE":
                raise
        await asyncio.sleep(0.1)
    raise AssertionError("no answer: " + process.log())


async def patient_result(process: TrainerProcess, client: Client, seq: int):  # type: ignore[no-untyped-def]
    for _ in range(200):
        try:
            return await client.result(seq)
        except OpenTinkerError as error:
            if error.code.name != "UNAVAILABLE":
                raise
        await asyncio.sleep(0.1)
    raise AssertionError("no answer")


async def test_killed_engines_and_servers_change_nothing(trainers: StartTrainer, bucket: S3Settings) -> None:
    """Each is killed once before the first recovery checkpoint and once after it."""
    process = trainers(recovery_every_steps=2)
    await process.start()
    kills = {0: "engine", 1: "front", 3: "engine", 4: "front"}

    async def disturb(process: TrainerProcess, client: Client, step: int) -> None:
        match kills.get(step):
            case "engine":
                process.kill_engine()
            case "front":
                process.kill()
                await process.start()

    async with process.client() as client:
        undisturbed = await train(process, client, "undisturbed")
        # Another policy, so that the weights are made anew and nothing is found.
        assert await train(process, client, "disturbed", disturb) == undisturbed
    objects = S3ObjectStore(bucket)
    recoveries = [info.key for info in await objects.list(f"{client.policy}/recovery/")]
    assert any(key.endswith("000000000012/manifest.json") for key in recoveries), recoveries


async def test_killed_in_the_middle_of_an_operation(trainers: StartTrainer) -> None:
    """The operation is in the engine when engine or server die; afterwards it has happened once."""
    digests = []
    process = trainers()
    await process.start()
    async with process.client() as client:
        for kill in (None, "engine", "front"):
            await client.create(str(kill), model=process.settings["base_model"])
            await client.forward_backward(HEAVY)
            if kill is not None:
                await wait_until(lambda: running(client), 20, what="running")
                await asyncio.sleep(0.3)
            if kill == "engine":
                process.kill_engine()
            elif kill == "front":
                process.kill()
                await process.start()
            request = client.step_request([1])
            await again(process, client, lambda r=request: client.call("OptimStep", r))
            assert (await patient_result(process, client, 2)).optim_step.step == 1
            publish = pb.PublishWeightsRequest(header=client.header())
            await again(process, client, lambda p=publish: client.call("PublishWeights", p))
            digests.append((await client.result(3)).publish_weights.version.sha256)
    assert len(set(digests)) == 1


async def running(client: Client) -> bool:
    request = pb.GetOperationRequest(policy=client.policy, seq=1)
    state = (await client.call("GetOperation", request)).operation.state
    assert state not in (DONE, FAILED), "too fast to be killed"
    return bool(state == 2)


async def test_an_operation_that_kills_the_engine_twice_is_skipped(trainers: StartTrainer) -> None:
    process = trainers()
    await process.start()
    async with process.client() as client:
        await client.create("victim", model=process.settings["base_model"])
        await client.forward_backward(HEAVY)
        for _ in range(2):
            await wait_until(lambda: running(client), 20, what="running")
            process.kill_engine()
            await asyncio.sleep(0.2)
        ended = await client.result(1)
        assert ended.state == FAILED
        assert "skipped" in ended.error.message
        # Its seq is consumed, other operations and policies go on.
        operation = await client.forward_backward(ragged_batch())
        await client.step([operation.seq])
        assert (await client.result(3)).optim_step.step == 1
        # And a restart does not try it again.
        process.kill()
        await process.start()
        await again(
            process, client, lambda: client.call("GetPolicy", pb.GetPolicyRequest(policy=client.policy))
        )
        assert (await patient_result(process, client, 3)).optim_step.step == 1


async def test_a_terminated_server_saves_and_the_next_goes_on_elsewhere(
    trainers: StartTrainer, bucket: S3Settings
) -> None:
    """Nothing of the old server's disk is needed: the object store holds everything."""
    process = trainers()
    await process.start()
    async with process.client() as client:
        await client.create(model=process.settings["base_model"])
        operation = await client.forward_backward(ragged_batch())
        await client.step([operation.seq])
        await client.forward_backward(ragged_batch())
        await client.result(3)
        assert process.terminate() == 0, process.log()
        policy = client.policy
    objects = S3ObjectStore(bucket)
    assert await objects.head(f"{policy}/recovery/{3:012d}/manifest.json") is not None

    other = trainers()
    (other.directory / "state").mkdir()
    (other.directory / "state" / "held_policies.json").write_text(json.dumps([policy]))
    await other.start()
    async with other.client() as client:
        client.policy, client.seq = policy, 3
        # Results that were not acknowledged are still there.
        assert (await client.result(2)).optim_step.step == 1
        await client.step([3])
        assert (await client.result(4)).optim_step.step == 2
        error = None
        try:
            await client.call("OptimStep", client.step_request([9], client.header(2, "x")))
        except OpenTinkerError as raised:
            error = raised
        assert error is not None
        assert error.reason == Reason.SEQ_REUSED
