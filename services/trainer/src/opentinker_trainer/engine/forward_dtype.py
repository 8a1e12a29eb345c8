"""Passes in a wider precision than the base model is stored in.

Where trainer and sampler disagree because a forward pass in bfloat16 rounds at every step, the stored
weights can be kept as they are and multiplied in float32: each linear layer widens its weight while it
runs, forwards and once more backwards, and nothing wide is kept. Everything else follows from the type of
the embedded tokens.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason


class _WideLinear(torch.autograd.Function):
    """x [..., in] @ weight [out, in]^T + bias in the precision of x; weight and bias are frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return grads[0] @ weight.to(grads[0].dtype), None, None


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return _WideLinear.apply(x, layer.weight, layer.bias)  # type: ignore[no-any-return, no-untyped-call]


def _embedding(dtype: torch.dtype, embed: Any, ids: Tensor) -> Tensor:
    return embed(ids).to(dtype)  # type: ignore[no-any-return]


def widen(model: Any, decoder: Any, dtype: torch.dtype) -> None:
    """Have a frozen model compute in `dtype`.

    ServiceError UNSUPPORTED_OPTION if it holds weights that are multiplied elsewhere than in linear layers.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]
        elif isinstance(module, nn.Embedding):
            module.forward = partial(_embedding, dtype, module.forward)  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            ids = torch.tensor([[1, 2, 3]], device=model.device)
            given = decoder(input_ids=ids, use_cache=False).last_hidden_state.dtype
    except RuntimeError:
        given = None
    if given != dtype:
        text = f"{type(model).__name__} cannot compute in another precision than it is stored in"
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="forward_dtype")
