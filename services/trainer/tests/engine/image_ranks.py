"""What a group of ranks computes of samples with images. Runs as a rank:

RANK=r WORLD_SIZE=n python -m services.trainer.tests.engine.image_ranks MODEL STORE RESULTS
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from services.trainer.tests.builders import gradient_of
from services.trainer.tests.engine.test_images import batch, run
from torch import Tensor

from opentinker_kit.models import image_settings
from opentinker_trainer.domain.plan import PlanSettings
from opentinker_trainer.engine.compute import ComputeSettings
from opentinker_trainer.engine.core import EngineSettings, TorchEngine
from opentinker_trainer.engine.group import join
from opentinker_trainer.engine.ranks import Ranks


def compute(model: Path, ranks: Ranks) -> dict[str, Tensor]:
    """Logprobs and gradient; the same calls on every rank."""
    settings = image_settings(model)
    assert settings is not None
    compute_settings = ComputeSettings(PlanSettings(token_budget=48))
    engine = TorchEngine(EngineSettings(model, "tiny", compute=compute_settings), ranks)
    output = run(engine, batch(settings))
    gradient = gradient_of(engine, "policies/p")
    found = {f"gradient/{name}": tensor.clone() for name, tensor in gradient.items()}
    for index, score in enumerate(output.scores):
        found[f"logprobs/{index}"] = torch.from_numpy(score.logprobs.copy())
    return found


def main() -> None:
    model, store, results = (Path(argument) for argument in sys.argv[1:4])
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    found = compute(model, join(dist.FileStore(str(store), count), rank, count))
    if rank == 0:
        save_file(found, results)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
