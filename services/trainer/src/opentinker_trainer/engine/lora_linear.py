"""A linear layer with a low-rank adapter, forwards and backwards, without peft's dispatch and temporaries.

peft computes base(x) + scale * B(A(x)) as five operations whose results have the size of the layer's output,
and keeps most of them for the backward pass. Here the adapter is added in place, and x and A(x) are all that
is kept. The arithmetic is the same up to the order of roundings: products of the adapter in float32, of the
base in its own precision.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class _LoraLinear(torch.autograd.Function):
    """x [T, in] @ weight [out, in]^T + bias + scale * x @ a [R, in]^T @ b [out, R]^T; weight is frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        inner = x.to(a.dtype) @ a.T
        output = functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        ctx.save_for_backward(x, weight, a, b, inner)
        ctx.scale = scale
        if output.dtype == b.dtype:
            return output.addmm_(inner, b.T, alpha=scale)
        return output.to(b.dtype).addmm_(inner, b.T, alpha=scale).to(output.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, inner = ctx.saved_tensors
        of_x, of_a, of_b = (ctx.needs_input_grad[index] for index in (0, 3, 4))
        grad = grads[0]
        exact = grad.to(b.dtype)
        of_inner = (exact @ b).mul_(ctx.scale)
        grad_x = grad_a = grad_b = None
        if of_a:
            grad_a = of_inner.T @ x.to(a.dtype)
        if of_b:
            grad_b = (exact.T @ inner).mul_(ctx.scale)
        if of_x:
            grad_x = grad @ weight.to(grad.dtype)
            if grad_x.dtype == a.dtype:
                grad_x.addmm_(of_inner, a)
            else:
                grad_x = grad_x.to(a.dtype).addmm_(of_inner, a).to(x.dtype)
        return grad_x, None, None, grad_a, grad_b, None


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """A frozen linear layer with an adapter, of x [..., in]."""
    flat = _LoraLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias, a, b, scale)  # type: ignore[no-untyped-call]
    return flat.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


class _FastForward:
    """Stands in for the `forward` of one of peft's LoRA layers."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._peft_forward = layer.forward

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer
        active = layer.active_adapters
        if layer.disable_adapters or not any(key in layer.lora_A for key in active):
            return layer.base_layer(x)
        if len(active) > 1 or layer.merged or args or kwargs:
            return self._peft_forward(x, *args, **kwargs)
        key = active[0]
        base = layer.base_layer
        return lora_linear(
            x, base.weight, base.bias, layer.lora_A[key].weight, layer.lora_B[key].weight, layer.scaling[key]
        )


def speed_up(layer: Any) -> None:
    """Replace the forward pass of a peft layer over an nn.Linear. Adapters may come and go afterwards."""
    if type(layer.base_layer) is torch.nn.Linear and not isinstance(layer.forward, _FastForward):
        layer.forward = _FastForward(layer)
