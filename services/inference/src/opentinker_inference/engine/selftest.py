"""Checks on this machine what batching relies on: a row's bits do not depend on the other rows.

Seen to hold for float32 on the machines tried; it is a property of the math libraries, not of arithmetic, so
it is checked at every start, with the model's own layers.
"""

import torch

from opentinker_inference.engine.kv import MIN_ROWS, KvView
from opentinker_inference.engine.model import DeterministicModel

_LENGTHS = (3, 17, 9, 30, 5, 12, 24, 8, 40, 21, 33, 6)
_CAPACITY = 64


def batches_are_invisible(model: DeterministicModel) -> bool:
    """Decode twelve rows together, and in smaller and differently ordered batches; compare the bits."""
    generator = torch.Generator().manual_seed(0)
    shape = model.shape
    size = shape.buffer(len(_LENGTHS), _CAPACITY).shape
    caches = torch.randn(size, generator=generator).to(shape.dtype)
    tokens = torch.randint(0, model.vocab_size, (len(_LENGTHS),), generator=generator).tolist()
    whole = _logits(model, caches, tokens, list(range(len(_LENGTHS))))
    for rows in ([0], [3, 1], [5, 2, 7], [4, 5, 6, 7], [11, 0, 8, 3, 9], [10, 9, 8, 7, 6, 5, 4]):
        part = _logits(model, caches, tokens, rows)
        if not all(torch.equal(part[i], whole[row]) for i, row in enumerate(rows)):
            return False
    return True


def linear_is_invisible(weight: torch.Tensor, max_rows: int) -> bool:
    """The same for one linear layer, `weight` [out, in]: an adapter's shapes are known only when it comes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((max(max_rows, 8), weight.shape[1]), generator=generator)
    whole = torch.nn.functional.linear(x, weight)
    return all(
        torch.equal(torch.nn.functional.linear(x[:rows], weight), whole[:rows])
        for rows in (MIN_ROWS, MIN_ROWS + 1, 7, max_rows // 2, max_rows)
        if MIN_ROWS <= rows <= x.shape[0]
    )


def _logits(
    model: DeterministicModel, caches: torch.Tensor, tokens: list[int], rows: list[int]
) -> torch.Tensor:
    filled = rows + [rows[0]] * max(0, MIN_ROWS - len(rows))
    positions = [_LENGTHS[row] for row in filled]
    view = KvView(caches[:, :, filled].clone(), torch.tensor(positions)[:, None])
    return model.step("", [tokens[row] for row in filled], positions, view)
