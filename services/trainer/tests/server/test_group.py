"""An engine of several processes behind the port: same bits each time, and a rank that dies ends the call."""

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from services.trainer.tests.builders import ragged_batch, sample
from services.trainer.tests.server.harness import cross_entropy, message

from opentinker_kit.errors import ServiceError
from opentinker_kit.testing import wait_until
from opentinker_trainer.adapters.engine_process import ProcessEngine
from opentinker_trainer.domain.tuning import FullSpec, LoraSpec, TuningSpec
from opentinker_trainer.settings import TrainerSettings
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.trainer.v1 import trainer_service_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAME = "policies/p"
STEP = pb.TrainOptimStepRequest(
    policy=NAME, adamw=trainer_service_pb2.AdamW(learning_rate=0.01), clip_norm=1.0
)
SPECS: list[TuningSpec] = [LoraSpec(4, 8.0, ("q_proj",), value_head=True), FullSpec(value_head=True)]


async def start(model: Path, folder: Path, **more: int) -> ProcessEngine:
    settings = TrainerSettings(base_model="tiny", threads=1, micro_batch_tokens=64, **more)  # type: ignore[arg-type]
    engine = ProcessEngine(
        "torch", settings.load_request(model), log_path=folder / "engine.log", lifeline_fd=None
    )
    await engine.start()
    return engine


async def gradient(engine: ProcessEngine, rows: list, denominator: float = 10.0) -> None:  # type: ignore[type-arg]
    request = pb.TrainForwardBackwardRequest(
        policy=NAME, samples=[message(row) for row in rows], losses=[cross_entropy(denominator)]
    )
    await engine.begin(pb.TrainBeginRequest(forward_backward=request))
    while not (await engine.advance(NAME)).HasField("forward_backward"):
        pass


async def train(engine: ProcessEngine, first: int, last: int) -> None:
    for step in range(first, last):
        await gradient(engine, [*ragged_batch(), sample(3, 9, step)])
        await engine.optim_step(STEP)


async def saved(engine: ProcessEngine, folder: Path, *, adapter_only: bool = False) -> dict[str, bytes]:
    files = (await engine.save(NAME, folder, adapter_only=adapter_only)).files
    return {name: (folder / name).read_bytes() for name in files}


async def test_a_rank_that_dies_ends_the_group_and_the_next_goes_on(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """From what was saved, in new processes, to the same bits; two groups of ranks compute the same."""
    engine = await start(tiny_model_dir, tmp_path, ranks=2)
    straight: list[dict[str, bytes]] = []
    for number, spec in enumerate(SPECS):
        await engine.create_policy(NAME, spec, 1)
        await train(engine, 0, 2)
        await gradient(engine, ragged_batch()[:3])
        await saved(engine, tmp_path / f"half{number}")
        await train(engine, 2, 4)
        straight.append(await saved(engine, tmp_path / f"straight{number}"))
        # What only rank 0 finds out, and what all of them do, is refused, and the group goes on.
        (tmp_path / "file").write_text("in the way")
        for call, reason in [
            (engine.save(NAME, tmp_path / "file" / "folder", adapter_only=False), Reason.STORAGE_FULL),
            (
                engine.restore(NAME, tmp_path / "none", weights_only=False, drop_gradient=False),
                Reason.INVALID_WEIGHTS,
            ),
        ]:
            with pytest.raises(ServiceError) as caught:
                await call
            assert caught.value.reason is reason
        assert await saved(engine, tmp_path / f"again{number}") == straight[number]

    heavy = asyncio.create_task(gradient(engine, [sample(200, 300, seed) for seed in range(40)]))
    group = psutil.Process(engine.pid)
    workers = group.children()
    assert len(workers) == 1
    await asyncio.sleep(0.5)
    assert not heavy.done(), "too fast to be killed"
    os.kill(workers[0].pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(ServiceError, match="rank 1 of 2 was killed by signal 9") as caught:
        await heavy
    assert caught.value.reason is Reason.ENGINE_CRASHED
    await asyncio.wait_for(asyncio.shield(engine.exited), 10)
    assert time.monotonic() - killed < 10
    await wait_until(lambda: not group.is_running() and not workers[0].is_running(), 5, what="all gone")

    engine = await start(tiny_model_dir, tmp_path, ranks=2)
    for number, spec in enumerate(SPECS):
        await engine.create_policy(NAME, spec, 9)
        half = tmp_path / f"half{number}"
        restored = await engine.restore(NAME, half, weights_only=False, drop_gradient=False)
        assert restored.step == 2
        await train(engine, 2, 4)
        assert await saved(engine, tmp_path / f"resumed{number}") == straight[number]
    # Files of two ranks are files as any other: one process goes on from them.
    await engine.close()
    engine = await start(tiny_model_dir, tmp_path)
    await engine.create_policy(NAME, SPECS[1], 9)
    await engine.restore(NAME, tmp_path / "half1", weights_only=False, drop_gradient=False)
    assert await saved(engine, tmp_path / "one") == {
        name: (tmp_path / "half1" / name).read_bytes()
        for name in (p.name for p in (tmp_path / "half1").iterdir())
    }
    await engine.close()
