"""The processes that a policy is spread over, and what they say to each other about a pass.

Every rank plans the same pass and runs its share of the micro-batches; sums are then added over ranks, never
averaged, because denominators are the request's own. Methods are collective: every rank calls them, in the
same order, whether it had anything to do or not.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor


class Ranks:
    """This process among those of a group; by default it is alone."""

    def __init__(self, rank: int = 0, count: int = 1, local: int | None = None) -> None:
        self.rank = rank
        self.count = count
        self.local = rank if local is None else local
        """Which of the GPUs that this process sees is its own."""

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks for the group and writes files."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank."""
        if self.count == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        longest = max(int(size) for size in sizes)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.count)]
        dist.all_gather(parts, torch.nn.functional.pad(data, (0, longest - len(data))))
        return [
            json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)
        ]

    def sum(self, value: float) -> float:
        """The sum over ranks, in float64 and rank order."""
        total = 0.0
        for part in self.gather(value):
            total += part
        return total

    def sum_arrays(self, arrays: Sequence[NDArray[np.float32]]) -> None:
        """Add what the ranks have, in place. Where only one has a value that is not 0, it is kept exactly."""
        if self.count == 1:
            return
        whole = torch.from_numpy(np.concatenate(arrays))
        dist.all_reduce(whole)
        parts = np.split(whole.numpy(), np.cumsum([len(array) for array in arrays])[:-1])
        for array, part in zip(arrays, parts, strict=True):
            array[:] = part

    def sum_gradients(
        self, gradients: dict[str, dict[str, Tensor]], parameters: Mapping[str, Tensor]
    ) -> None:
        """Add the gradients of parameters that every rank has, by bucket; no gradient counts as 0."""
        if self.count == 1 or not parameters:
            return
        filled = [bucket for bucket, gradient in gradients.items() if gradient]
        for bucket in sorted({bucket for part in self.gather(filled) for bucket in part}):
            gradient = gradients.setdefault(bucket, {})
            parts = [gradient.get(name, torch.zeros_like(value)) for name, value in parameters.items()]
            whole = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(whole)
            summed = whole.split([part.numel() for part in parts])
            for (name, value), part in zip(parameters.items(), summed, strict=True):
                gradient[name] = part.view(value.shape)
