"""Importing the client costs next to nothing and needs none of what services need."""

import subprocess
import sys

import pytest

import opentinker

HEAVY = (
    "torch",
    "transformers",
    "rich",
    "typer",
    "tokenizers",
    "jinja2",
    "matplotlib",
    "yaml",
    "minio",
    "nats",
)


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_import_is_light() -> None:
    loaded = modules_after("import opentinker")
    assert not loaded & {"grpc", "numpy", *HEAVY}


def test_everything_public_loads_without_the_training_stack() -> None:
    loaded = modules_after("import opentinker\nfor name in opentinker.__all__: getattr(opentinker, name)")
    assert "grpc" in loaded
    assert not loaded & set(HEAVY)
    kit = [name for name in loaded if name.startswith("opentinker_")]
    assert not kit


def test_public_names_exist_and_are_pinned() -> None:
    for name in opentinker.__all__:
        assert getattr(opentinker, name) is not None
    assert {"connect", "fit", "run", "evaluate", "rollouts", "train_samples", "advantages"} <= set(
        opentinker.__all__
    )
    assert {"LoRA", "GRPO", "PPO", "AdamW", "Evaluation", "Environment", "single_turn"} <= set(
        opentinker.__all__
    )
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = opentinker.nothing
