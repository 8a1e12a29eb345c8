"""What a forward and backward pass takes in memory: the program of `loss_memory`.

`--kind ours`: a ForwardBackward whose 4,096 tokens are all trained on. `--kind chunk`: the same model on
the same rows, whose loss is written in plain torch and reads the logits of one chunk of tokens only, so
that what remains is the model's own need. Prints the peak above what was there before, in MiB.
"""

import argparse
import json
import sys
from pathlib import Path

MODEL = "smollm2-135m-instruct"
ROWS, LENGTH = 4, 1024
CHUNK = 256


def reset_peak() -> float:
    """Forget the peak; what is resident now, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> float:
    return _status("VmHWM")


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {name} in /proc/self/status")


def measure(kind: str, threads: int) -> float:
    import numpy as np
    import torch
    from torch.nn import functional

    from benchmarks.train_rows import equal_rows
    from opentinker_kit.models import resolve_model
    from opentinker_trainer.domain.losses import Component, CrossEntropy
    from opentinker_trainer.domain.plan import PlanSettings
    from opentinker_trainer.domain.samples import Sample
    from opentinker_trainer.domain.tuning import LoraSpec
    from opentinker_trainer.engine.compute import ComputeSettings
    from opentinker_trainer.engine.core import EngineSettings, TorchEngine

    plan = PlanSettings(token_budget=ROWS * LENGTH, pack=False)
    compute = ComputeSettings(plan, logit_rows=CHUNK, slice_tokens=ROWS * LENGTH)
    path = resolve_model(MODEL, model_roots=[]).path
    engine = TorchEngine(EngineSettings(path, MODEL, threads=threads, compute=compute))
    targets = tuple(engine.base.linear_layers)
    policy = engine.create_policy("policies/p", LoraSpec(16, 32.0, targets), seed=0)
    samples = [
        Sample(
            token_ids=np.array(row.token_ids, np.int32),
            loss_mask=np.arange(LENGTH) > 0,
        )
        for row in equal_rows(ROWS, LENGTH)
    ]
    before = reset_peak()
    if kind == "ours":
        output = engine.forward_backward("policies/p", samples, [Component("main", CrossEntropy(), 1.0)])
        assert output.trained_tokens == ROWS * (LENGTH - 1)
    else:
        ids = torch.from_numpy(np.stack([sample.token_ids for sample in samples]).astype(np.int64))
        with policy.weights.active():
            hidden = policy.weights.view.decoder(input_ids=ids, use_cache=False).last_hidden_state
            logits = functional.linear(hidden.flatten(0, 1)[:CHUNK], engine.base.output[0])
            loss = functional.cross_entropy(logits, ids.flatten()[1 : CHUNK + 1])
            torch.autograd.grad(loss, list(policy.parameters.values()))
    return peak() - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("ours", "chunk"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    print(json.dumps({"peak_mib": round(measure(arguments.kind, arguments.threads), 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
