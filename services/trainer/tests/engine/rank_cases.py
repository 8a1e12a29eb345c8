"""What a group of ranks computes, to be compared with one process. Runs as a rank:

RANK=r WORLD_SIZE=n python -m services.trainer.tests.engine.rank_cases MODEL STORE RESULTS
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from services.trainer.tests.engine.cases import CASES, full_batch
from torch import Tensor

from opentinker_trainer.domain.losses import Component, CrossEntropy
from opentinker_trainer.domain.plan import PlanSettings
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.domain.tuning import AdamWStep, FullSpec, LoraSpec, TuningSpec
from opentinker_trainer.engine.compute import ComputeSettings
from opentinker_trainer.engine.core import EngineSettings, TorchEngine
from opentinker_trainer.engine.group import join
from opentinker_trainer.engine.ranks import Ranks

POLICY = "policies/p"
SPECS: dict[str, TuningSpec] = {
    "lora": LoraSpec(4, 8.0, ("down_proj", "lm_head", "q_proj"), value_head=True),
    "full": FullSpec(value_head=True),
    "recomputed": FullSpec(value_head=True, activation_checkpointing=True),
}
LATE = Component("late", CrossEntropy(), denominator=None, coefficient=0.5)
FEW = ("ppo", "gspo", "value_clipped", "entropy", "kl_k3", "cross_entropy")


@dataclass(frozen=True)
class Request:
    """A ForwardBackward."""

    samples: list[Sample]
    components: list[Component]
    skip_inert: bool = False


def requests(kind: str) -> Iterator[tuple[str, Request]]:
    rows = full_batch()
    for name in CASES if kind == "lora" else FEW:
        yield name, Request(rows, [CASES[name]])
    if kind == "recomputed":
        return
    late, value, ppo = LATE, CASES["value"], CASES["ppo"]
    # Some rows have only a value loss, which says nothing to the output layer.
    marked = [
        replace(row, components=frozenset({"value"} if i % 2 else {"ppo", "late"}))
        for i, row in enumerate(rows)
    ]
    yield "mixed", Request(marked, [ppo, value, late])
    yield "one row", Request(rows[3:4], [ppo, late])
    # Most ranks have nothing to do: rows without loss tokens, and rows that cannot contribute (B20, B113).
    silent = [replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in rows]
    yield "few tokens", Request([*silent[:5], rows[5]], [ppo])
    nothing = [replace(row, weights=np.zeros(row.length, np.float32)) for row in rows]
    yield "nothing", Request(nothing, [ppo, late], skip_inert=True)


def make_engine(model: Path, ranks: Ranks) -> TorchEngine:
    plan = PlanSettings(token_budget=48, share_prefix=True)
    settings = EngineSettings(
        model, "tiny", dtype="float64", compute=ComputeSettings(plan, logit_rows=16, slice_tokens=96)
    )
    return TorchEngine(settings, ranks)


def shake(engine: TorchEngine) -> None:
    """Move the policy away from where it begins, the same whole weights on any number of ranks."""
    policy = engine._policies[POLICY]
    random = np.random.default_rng(5)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            noise = torch.from_numpy(0.02 * random.standard_normal(policy.weights.shape(name)))
            parameter.add_(policy.weights.part(name, noise).to(parameter.dtype))
    policy.weights.changed()


def compute(engine: TorchEngine) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Numbers and tensors by name; the same calls on every rank."""
    numbers: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for kind, spec in SPECS.items():
        policy = engine.create_policy(POLICY, spec, seed=3)
        shake(engine)
        for case, request in requests(kind):
            policy.gradients = {}
            output = engine.forward_backward(
                POLICY, request.samples, request.components, skip_inert=request.skip_inert
            )
            key = f"{kind}/{case}"
            numbers[key] = [output.loss_sums, output.metrics, output.trained_tokens]
            for index, score in enumerate(output.scores):
                tensors[f"{key}/logprobs/{index}"] = torch.from_numpy(score.logprobs.copy())
                assert score.values is not None
                tensors[f"{key}/values/{index}"] = torch.from_numpy(score.values.copy())
            for bucket, gradient in policy.gradients.items():
                for name, part in gradient.items():
                    whole = policy.weights.whole(name, part)
                    if whole is not None:
                        tensors[f"{key}/gradient/{bucket}/{name}"] = whole.clone()
        policy.gradients = {}
        engine.forward_backward(POLICY, full_batch(), [CASES["ppo"], LATE])
        report = engine.optim_step(POLICY, AdamWStep(1e-2, clip_norm=0.5), {"late": 3.0})
        forward = engine.forward(POLICY, full_batch())
        numbers[f"{kind}/step"] = [{"norm": [report.grad_norm, 1.0]}, forward.metrics, report.step]
    return numbers, tensors


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "numbers.json").read_text()), load_file(folder / "tensors.safetensors")


def main() -> None:
    model, store, folder = (Path(argument) for argument in sys.argv[1:4])
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    ranks = join(dist.FileStore(str(store), count), rank, count)
    numbers, tensors = compute(make_engine(model, ranks))
    if rank == 0:
        save_file(tensors, folder / "tensors.safetensors")
        (folder / "numbers.json").write_text(json.dumps(numbers))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
