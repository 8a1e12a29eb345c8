"""One rank over NCCL (gloo on a CPU): the collectives that the trainer uses, and a step of FSDP2.

Whether the backend starts, sums are exact, and a sharded layer gives the gradient of a plain one.
"""

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scripts.gpu_checks import Setup, report

_VALUES = 1 << 24


def run(setup: Setup) -> dict[str, object]:
    backend = "cpu:gloo,cuda:nccl" if setup.device == "cuda" else "gloo"
    device = torch.device(setup.device)
    with tempfile.TemporaryDirectory(dir=setup.scratch) as directory:
        store = FileStore(str(Path(directory) / "rendezvous"), 1)
        dist.init_process_group(backend, rank=0, world_size=1, store=store)
        try:
            return {"backend": backend, **_collectives(device), **_sharded(device)}
        finally:
            dist.destroy_process_group()


def _collectives(device: torch.device) -> dict[str, object]:
    values = torch.arange(_VALUES, dtype=torch.float32, device=device).remainder_(251)
    whole = values.clone()
    dist.all_reduce(whole)
    began = time.perf_counter()
    dist.all_reduce(whole)
    gathered = [torch.empty_like(values)]
    dist.all_gather(gathered, values)
    _wait(device)
    seconds = time.perf_counter() - began
    same = torch.equal(whole, values) and torch.equal(gathered[0], values)
    if not same:
        raise RuntimeError("a sum or a gather over one rank changed the values")
    return {"collectives_s": round(seconds, 4)}


def _sharded(device: torch.device) -> dict[str, object]:
    torch.manual_seed(0)
    plain = nn.Linear(64, 64, device=device)
    cut = nn.Linear(64, 64, device=device)
    cut.load_state_dict(plain.state_dict())
    fully_shard(cut, mesh=init_device_mesh(device.type, (1,)))
    inputs = torch.randn(32, 64, device=device)
    for layer in (plain, cut):
        layer(inputs).square().sum().backward()
    assert plain.weight.grad is not None
    assert cut.weight.grad is not None
    ours: torch.Tensor = cut.weight.grad.full_tensor()  # type: ignore[attr-defined]
    gap = float((ours - plain.weight.grad).abs().max())
    scale = float(plain.weight.grad.abs().max())
    if not gap <= 1e-3 * scale:
        raise RuntimeError(f"the gradient of a sharded layer is off by {gap:g} of {scale:g}")
    return {"sharded_gradient_gap": gap / scale}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    report(run)
