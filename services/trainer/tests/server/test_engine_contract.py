"""What every engine behind the port does: the one of the tests, the no-op one and the real one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from services.trainer.tests.builders import ragged_batch
from services.trainer.tests.server.fakes import FakeEngine
from services.trainer.tests.server.harness import cross_entropy, message

from opentinker_kit.errors import ServiceError
from opentinker_trainer.adapters.engine_process import ProcessEngine
from opentinker_trainer.domain.tuning import FullSpec, LoraSpec, TuningSpec
from opentinker_trainer.ports import Engine
from opentinker_trainer.settings import TrainerSettings
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.trainer.v1 import trainer_service_pb2

NAME = "policies/p"
SPECS: dict[str, TuningSpec] = {
    "lora": LoraSpec(2, 4.0, ("q_proj",)),
    "full": FullSpec(value_head=True, activation_checkpointing=True),
}
SAMPLES = [message(row) for row in ragged_batch()[:3]]
GRADIENT = pb.TrainBeginRequest(
    forward_backward=pb.TrainForwardBackwardRequest(policy=NAME, samples=SAMPLES, losses=[cross_entropy()])
)
LOOK = pb.TrainBeginRequest(forward=pb.TrainForwardRequest(policy=NAME, samples=SAMPLES))
STEP = pb.TrainOptimStepRequest(policy=NAME, adamw=trainer_service_pb2.AdamW(learning_rate=0.1))


@pytest.fixture(params=["fake", "noop", "torch"])
async def engine(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_model_dir: Path
) -> AsyncIterator[Engine]:
    """A started engine."""
    made: Engine
    if request.param == "fake":
        made = FakeEngine()
    else:
        settings = TrainerSettings(base_model="tiny", engine=request.param, threads=1)
        made = ProcessEngine(
            request.param,
            settings.load_request(tiny_model_dir),
            log_path=tmp_path / "engine.log",
            lifeline_fd=None,
        )
    model = await made.start()
    assert "q_proj" in model.shape.linear_layers
    assert model.vocab_size > 0
    yield made
    await made.close()
    await asyncio.wait_for(asyncio.shield(made.exited), 10)
    with pytest.raises(ServiceError) as caught:
        await made.begin(GRADIENT)
    assert caught.value.reason is Reason.ENGINE_CRASHED


async def whole(engine: Engine, request: pb.TrainBeginRequest) -> pb.TrainAdvanceResponse:
    """A pass with all its slices; before the last one nothing is answered."""
    answer = pb.TrainAdvanceResponse()
    for _ in range(await engine.begin(request)):
        assert answer == pb.TrainAdvanceResponse()
        answer = await engine.advance(NAME)
    assert answer.WhichOneof("answer") == request.WhichOneof("pass")
    return answer


async def saved(engine: Engine, directory: Path, *, adapter_only: bool = False) -> dict[str, bytes]:
    files = (await engine.save(NAME, directory, adapter_only=adapter_only)).files
    return {name: (directory / name).read_bytes() for name in files}


async def test_an_engine_does_what_the_front_relies_on(engine: Engine, tmp_path: Path) -> None:
    for kind, spec in SPECS.items():
        await check(engine, spec, tmp_path / kind)


async def check(engine: Engine, spec: TuningSpec, tmp_path: Path) -> None:
    await engine.create_policy(NAME, spec, 1)
    # Steps count up, and move the weights.
    first = await saved(engine, tmp_path / "0")
    await whole(engine, GRADIENT)
    assert (await engine.optim_step(STEP)).result.step == 1
    one = await saved(engine, tmp_path / "1")
    assert one != first

    # The same state is the same bytes, and what is saved can be gone back to.
    assert await saved(engine, tmp_path / "again") == one
    await whole(engine, GRADIENT)
    assert (await engine.optim_step(STEP)).result.step == 2
    two = await saved(engine, tmp_path / "2")
    assert two != one
    restored = await engine.restore(NAME, tmp_path / "1", weights_only=False, drop_gradient=False)
    assert restored.step == 1
    assert await saved(engine, tmp_path / "back") == one
    await whole(engine, GRADIENT)
    await engine.optim_step(STEP)
    assert await saved(engine, tmp_path / "replayed") == two

    # Looking changes nothing; making anew begins anew.
    assert (await whole(engine, LOOK)).HasField("forward")
    assert await saved(engine, tmp_path / "looked") == two
    await engine.create_policy(NAME, spec, 1)
    assert await saved(engine, tmp_path / "anew") == first
    weights = await saved(engine, tmp_path / "weights", adapter_only=True)
    assert weights.items() <= first.items()
    assert "engine.json" not in weights

    # A policy that is not there is refused by name, dropping it twice is fine.
    await engine.drop_policy(NAME)
    await engine.drop_policy(NAME)
    for call in (engine.begin(GRADIENT), engine.optim_step(STEP)):
        with pytest.raises(ServiceError) as caught:
            await call
        assert caught.value.reason is Reason.POLICY_NOT_FOUND
