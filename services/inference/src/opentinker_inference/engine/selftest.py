"""Finds on this machine what batching relies on: batch sizes that a row's bits do not depend on.

A linear layer's kernels handle whole blocks of rows; what is left over takes another path and may round
otherwise. Seen for float32: with one thread every batch of 4 rows and more gives a row the same bits, with
two threads multiples of 4 do. It is a property of the math libraries, not of arithmetic, so it is measured at
every start, with the model's own layers.
"""

from collections.abc import Iterable

import torch

from opentinker_inference.engine.kv import KvView
from opentinker_inference.engine.model import DeterministicModel

_QUANTA = (4, 8, 16, 32, 64)
_LENGTHS = (3, 17, 9, 30, 5, 12, 24, 8, 40, 21, 33, 6)
_CAPACITY = 64


def find_quantum(model: DeterministicModel, max_rows: int) -> int:
    """Smallest number whose multiples are batch sizes that show in no bit; 0 if there is none."""
    for quantum in _QUANTA:
        if quantum > max(max_rows, _QUANTA[0]):
            break
        if linears_are_invisible(model.linear_weights(), quantum, max_rows) and _decoding_is_invisible(
            model, quantum
        ):
            return quantum
    return 0


def linears_are_invisible(weights: Iterable[torch.Tensor], quantum: int, max_rows: int) -> bool:
    """Whether linear layers [out, in] give a row the same bits in every batch of a multiple of `quantum`."""
    generator = torch.Generator().manual_seed(0)
    most = -(-max(max_rows, 4 * quantum) // quantum) * quantum
    sizes = sorted({quantum, 2 * quantum, 3 * quantum, 5 * quantum, most - quantum, most})
    for weight in weights:
        x = torch.randn((most, weight.shape[1]), generator=generator).to(weight.dtype)
        whole = torch.nn.functional.linear(x, weight)
        for rows in sizes:
            if rows < most and not torch.equal(torch.nn.functional.linear(x[:rows], weight), whole[:rows]):
                return False
    return True


def _decoding_is_invisible(model: DeterministicModel, quantum: int) -> bool:
    """Decode twelve rows together, and in smaller and differently ordered batches; compare the bits."""
    generator = torch.Generator().manual_seed(0)
    shape = model.shape
    size = shape.buffer(len(_LENGTHS), _CAPACITY).shape
    caches = torch.randn(size, generator=generator).to(shape.dtype)
    tokens = torch.randint(0, model.vocab_size, (len(_LENGTHS),), generator=generator).tolist()
    whole = _logits(model, caches, tokens, list(range(len(_LENGTHS))), quantum)
    for rows in ([0], [3, 1], [5, 2, 7], [4, 5, 6, 7], [11, 0, 8, 3, 9], [10, 9, 8, 7, 6, 5, 4]):
        part = _logits(model, caches, tokens, rows, quantum)
        if not all(torch.equal(part[i], whole[row]) for i, row in enumerate(rows)):
            return False
    return True


def _logits(
    model: DeterministicModel, caches: torch.Tensor, tokens: list[int], rows: list[int], quantum: int
) -> torch.Tensor:
    filled = rows + [rows[0]] * (-len(rows) % quantum)
    positions = [_LENGTHS[row] for row in filled]
    view = KvView(caches[:, :, filled].clone(), torch.tensor(positions)[:, None])
    return model.step("", [tokens[row] for row in filled], positions, view)
