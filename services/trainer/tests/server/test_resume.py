"""Ten steps straight are five, a kill -9 in the middle of a step, and five: the same bits (B99, B100).

float32 on CPU, through the real server: the engine is killed with its front, and what comes back is restored
from the object store and the operation log.
"""

import json
from collections.abc import Callable

import pytest
from services.trainer.tests.builders import ragged_batch, sample
from services.trainer.tests.server.conftest import StartTrainer
from services.trainer.tests.server.harness import Client, TrainerProcess, pb

from opentinker_kit.objects import S3ObjectStore
from opentinker_kit.settings import S3Settings
from opentinker_kit.testing import wait_until
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.runtime.errors import OpenTinkerError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 10
LORA = policy_pb2.Tuning(lora=policy_pb2.LoraTuning(rank=4), value_head=True)
FULL = policy_pb2.Tuning(full=policy_pb2.FullTuning())


@pytest.mark.parametrize(
    ("tuning", "ranks"), [(LORA, 1), (FULL, 1), (FULL, 2)], ids=["lora", "full", "ranks"]
)
async def test_killed_after_five_steps_and_a_half(
    tuning: policy_pb2.Tuning, ranks: int, trainers: StartTrainer, bucket: S3Settings
) -> None:
    process = trainers(recovery_every_steps=3, **({"ranks": ranks} if ranks > 1 else {}))
    await process.start()

    async with process.client() as client:

        async def held() -> bool:
            try:
                await client.call("GetPolicy", pb.GetPolicyRequest(policy=client.policy))
            except OpenTinkerError:
                return False
            return True

        async def killed() -> None:
            process.kill()
            await process.start()
            await wait_until(held, 60, what="the policy is back")

        straight = await train(process, client, tuning, "straight")
        broken = await train(process, client, tuning, "broken", killed)
        objects = S3ObjectStore(bucket)
        assert await files(objects, broken[0]) == await files(objects, straight[0])
        assert broken[1] == straight[1]
        # The comparison can fail: one step more is another state.
        await client.done(await client.step([(await client.forward_backward(batch(99))).seq]))
        later = (await client.done(await client.save())).save_checkpoint.checkpoint
        changed = await files(objects, later.manifest_key)
        assert all(
            changed[name] != sha256
            for name, sha256 in (await files(objects, straight[0])).items()
            if name.endswith(".safetensors") and name != "value_head.safetensors"
        )


async def train(
    process: TrainerProcess,
    client: Client,
    tuning: policy_pb2.Tuning,
    request_id: str,
    disturb: Callable[[], object] | None = None,
) -> tuple[str, list[tuple[float, float]]]:
    """Train in halves of batches; manifest of a checkpoint at the end, and every loss and gradient norm."""
    made = await client.call(
        "CreatePolicy",
        pb.CreatePolicyRequest(
            request_id=request_id, base_model=process.settings["base_model"], tuning=tuning, seed=7
        ),
    )
    client.policy, client.seq = made.policy.name, 0
    numbers: list[tuple[float, float]] = []
    for step in range(STEPS):
        first = await client.done(await client.forward_backward(batch(step)[:4]))
        if disturb is not None and step == STEPS // 2:
            await disturb()  # type: ignore[misc]
        second = await client.done(await client.forward_backward(batch(step)[4:]))
        stepped = await client.done(await client.step([first.seq, second.seq]))
        losses = [half.forward_backward.components[0].loss_sum for half in (first, second)]
        numbers.append((sum(losses), stepped.optim_step.grad_norm))
        assert stepped.optim_step.step == step + 1
    saved = (await client.done(await client.save())).save_checkpoint.checkpoint
    return saved.manifest_key, numbers


def batch(step: int) -> list:  # type: ignore[type-arg]
    return [*ragged_batch()[:6], sample(5, 9, 100 + step), sample(4, 7, 200 + step)]


async def files(objects: S3ObjectStore, manifest_key: str) -> dict[str, str]:
    """Hash of every file of a checkpoint: weights, moments, counters, random generator."""
    manifest = json.loads(await objects.get(manifest_key))
    assert {"engine.json", "front.json", "optimizer.safetensors"} <= {
        file["name"] for file in manifest["files"]
    }
    return {file["name"]: file["sha256"] for file in manifest["files"]}
