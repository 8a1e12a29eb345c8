"""A base stored in bfloat16 that computes in float32: as if its weights had been stored in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from services.trainer.tests.builders import gradient_of, largest, largest_difference, ragged_batch
from services.trainer.tests.engine.conftest import SPEC

from opentinker_trainer.domain.losses import Component, Ppo
from opentinker_trainer.domain.tuning import AdamWStep, FullSpec, TuningSpec
from opentinker_trainer.engine.compute import ComputeSettings
from opentinker_trainer.engine.core import EngineSettings, TorchEngine
from opentinker_trainer.settings import TrainerSettings

ROWS = ragged_batch()
PPO = Component("main", Ppo(), 40.0)


@pytest.fixture(scope="module")
def rounded_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with weights that bfloat16 holds exactly."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    path = tmp_path_factory.mktemp("rounded")
    model.float().save_pretrained(path)
    return path


@pytest.mark.parametrize("spec", [SPEC, FullSpec()], ids=["lora", "full"])
def test_a_float32_forward_over_bfloat16_is_a_float32_forward(rounded_dir: Path, spec: TuningSpec) -> None:
    found = []
    for dtype, forward_dtype in (("float32", ""), ("bfloat16", "float32"), ("bfloat16", "")):
        engine = TorchEngine(
            EngineSettings(
                rounded_dir, "m", dtype=dtype, forward_dtype=forward_dtype, compute=ComputeSettings()
            )
        )
        assert engine.base.output[0].dtype == getattr(torch, dtype)
        engine.create_policy("p", spec, seed=1)
        engine.forward_backward("p", ROWS, [PPO])
        engine.optim_step("p", AdamWStep(1e-2))
        engine.forward_backward("p", ROWS, [PPO])
        scores = engine.forward("p", ROWS).scores
        base = engine.forward("p", ROWS, use_base_model=True).scores
        logprobs = np.concatenate([score.logprobs for score in (*scores, *base)])
        found.append((logprobs, {name: value.clone() for name, value in gradient_of(engine, "p").items()}))
    exact, wide, narrow = found
    np.testing.assert_allclose(wide[0], exact[0], atol=1e-5)
    assert largest_difference(wide[1], exact[1]) < 1e-5 * max(1.0, largest(exact[1]))
    # Without it the gap is that of bfloat16.
    assert np.abs(narrow[0] - exact[0]).max() > 1e-3


def test_other_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match="forward_dtype is bfloat16 over float32"):
        TrainerSettings(base_model="m", forward_dtype="bfloat16")
    settings = TrainerSettings(base_model="m", dtype="bfloat16", forward_dtype="float32")
    assert settings.load_request(Path("m")).forward_dtype == "float32"
    assert settings.weight_bytes() == 4
