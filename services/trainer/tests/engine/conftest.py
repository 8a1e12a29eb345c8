from collections.abc import Callable
from pathlib import Path

import pytest

from opentinker_trainer.domain.plan import PlanSettings
from opentinker_trainer.domain.tuning import LoraSpec
from opentinker_trainer.engine.compute import ComputeSettings
from opentinker_trainer.engine.core import EngineSettings, TorchEngine

MakeEngine = Callable[..., TorchEngine]

ALL_LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
SPEC = LoraSpec(8, 16.0, ALL_LINEAR)


@pytest.fixture(scope="session")
def make_engine(tiny_model_dir: Path) -> MakeEngine:
    """Builds engines over the tiny model; keywords are settings of the launch."""

    def make(
        *,
        dtype: str = "float32",
        forward_dtype: str = "",
        device: str = "cpu",
        attention: str = "sdpa",
        logit_rows: int = 256,
        slice_tokens: int = 1024,
        lanes: int = 1,
        shard_bytes: int = 2**30,
        **plan: int | bool,
    ) -> TorchEngine:
        compute = ComputeSettings(PlanSettings(**plan), logit_rows, slice_tokens, lanes)  # type: ignore[arg-type]
        return TorchEngine(
            EngineSettings(
                tiny_model_dir,
                "tiny-qwen3-random",
                dtype=dtype,
                forward_dtype=forward_dtype,
                device=device,
                attention=attention,
                threads=lanes,
                compute=compute,
                shard_bytes=shard_bytes,
            )
        )

    return make


@pytest.fixture(scope="session")
def shared_engine(make_engine: MakeEngine) -> TorchEngine:
    """An engine of the session for tests that only add policies of their own names."""
    return make_engine()
