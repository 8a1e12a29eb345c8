"""Runs of `fit()` on doubles, and what they sent to the trainer."""

from pathlib import Path
from typing import Any

import numpy as np
from client.tests.doubles.cluster import World

import opentinker as ot
from opentinker.loop.result import FitResult
from opentinkerapi.runtime.tensors import unpack_floats

EVEN = ot.single_turn(
    [{"prompt": f"Say an even number ({i})."} for i in range(20)],
    reward=lambda answer, task: float(int(answer) % 2 == 0),
    name="even",
)
ALWAYS = ot.single_turn([{"prompt": "Hello?"}], reward=lambda answer, task: 1.0, name="always")


def train(doubles: World, tmp_path: Path, algorithm: Any, **options: Any) -> FitResult:
    defaults: dict[str, Any] = {"steps": 1, "groups_per_step": 2, "run_dir": tmp_path / "run", "seed": 5}
    return ot.fit(options.pop("env", EVEN), "tiny", algorithm=algorithm, **{**defaults, **options})


def methods(doubles: World, policy: str | None = None) -> list[str]:
    return [method for name, method, _ in doubles.trainer.ran if policy in (None, name)]


def sent(doubles: World, method: str = "ForwardBackward", policy: str | None = None) -> list[Any]:
    return [
        messages for name, each, messages in doubles.trainer.ran if each == method and policy in (None, name)
    ]


def at_loss(sample: Any, name: str) -> list[float]:
    mask = np.frombuffer(sample.loss_mask, np.uint8) == 1
    return [float(value) for value in unpack_floats(getattr(sample, name))[mask]]


def terms(messages: list[Any]) -> dict[str, Any]:
    return {term.name: term for term in messages[0].losses}
