"""A model cut over the ranks of a process group with FSDP2."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from opentinker_trainer.engine.model_view import ResultT
from opentinker_trainer.engine.numerics import accumulator
from opentinker_trainer.engine.tensor_files import Shape


class _Root(nn.Module):
    """Runs any work as its forward pass, so that what the work uses of the model outside of its layers
    (embeddings, norm, output layer) is put together around it.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


class Sharded:
    """Weights cut along their first dimension: each rank keeps and steps its part."""

    def __init__(self, model: Any, layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
        """`dtype`: of the forward pass; the parts stay as the model's weights are."""
        wide = accumulator(dtype)
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == wide else dtype, reduce_dtype=None if dtype == wide else wide
        )
        self._count = dist.get_world_size()
        self._rank = dist.get_rank()
        # Said, because torch would take a GPU that happens to be there.
        mesh = init_device_mesh(next(model.parameters()).device.type, (self._count,))
        self._root: Any = _Root(model)
        for module in (*layers, self._root):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                # Denominators are the request's: ranks add, they do not average.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def parts(self) -> dict[str, Tensor]:
        """Name in the model -> this rank's part; written to by the optimizer."""
        with torch.no_grad():
            return {name: weight.to_local().detach() for name, weight in self._weights().items()}

    def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run model calls of a micro-batch. Collective."""
        result: ResultT = self._root(work)
        return result

    def gradients(self, term: Tensor, *, keep_graph: bool) -> dict[str, Tensor]:
        """This rank's part of the gradient of the sum of all ranks' terms. Collective."""
        term.backward(retain_graph=keep_graph)
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, weight in self._weights().items():
                gradient = weight.grad
                whole: Any = torch.zeros_like(weight) if gradient is None else gradient
                found[name] = whole.to_local()
                weight.grad = None
        return found

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        chunks = whole.chunk(self._count)
        return chunks[self._rank] if self._rank < len(chunks) else whole[:0]

    def whole(self, part: Tensor, shape: Shape) -> Tensor:
        """A whole tensor of the parts that the ranks have. Collective."""
        weight = next(iter(self._weights().values()))
        stride = torch.empty(shape, device="meta").stride()
        cut = DTensor.from_local(
            part, weight.device_mesh, weight.placements, shape=torch.Size(shape), stride=stride
        )
        whole: Tensor = cut.full_tensor()
        return whole

    def _weights(self) -> dict[str, Any]:
        return {name.removeprefix("model."): weight for name, weight in self._root.named_parameters()}
