"""Logprobs of chosen tokens from hidden states, in chunks, never a whole [B, L, V] array of logits.

Only rows that predict a loss token reach the output layer, `chunk` of them at a time. The backward pass
computes each chunk's logits again instead of keeping them (kept only where one chunk holds everything), so
the peak is a few arrays of [chunk, V].
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from opentinker_trainer.engine.numerics import accumulator


class TokenScores(NamedTuple):
    """Of N tokens, in float32 (float64 for float64 models)."""

    logprobs: Tensor
    """[N], differentiable."""
    entropy: Tensor
    """[N], without gradient; empty where not asked for."""


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    *,
    chunk: int,
    entropy: bool,
) -> TokenScores:
    """Score `targets` [N] under softmax((hidden [N, H] @ weight [V, H]^T + bias) / temperatures [N])."""
    logprobs, entropies = _TokenScores.apply(hidden, weight, bias, targets, temperatures, chunk, entropy)  # type: ignore[no-untyped-call]
    return TokenScores(logprobs, entropies)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight, bias).to(accumulator(weight.dtype))
    if bool((temperatures != 1).any()):
        logits = logits / temperatures[:, None]
    return logits


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        dtype = accumulator(weight.dtype)
        logprobs = torch.empty(count, dtype=dtype)
        entropies = torch.empty(count if entropy else 0, dtype=dtype)
        normalizers = torch.empty(count, dtype=dtype)
        kept: Tensor | None = None
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias, temperatures[part])
            total = torch.logsumexp(logits, dim=-1)
            normalizers[part] = total
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - total
            if entropy or count <= chunk:
                scores = logits.sub_(total[:, None])
                if entropy:
                    # A logit of -inf has probability 0 and adds nothing.
                    entropies[part] = -(scores.exp() * scores.clamp_min(torch.finfo(dtype).min)).sum(-1)
                if count <= chunk:
                    kept = scores
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, normalizers, kept)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, normalizers, kept = ctx.saved_tensors
        result = torch.empty_like(hidden)
        count = hidden.shape[0]
        for start in range(0, count, ctx.chunk):
            part = slice(start, start + ctx.chunk)
            if kept is not None:
                scores = kept
            else:
                scores = _logits(hidden[part], weight, bias, temperatures[part])
                scores = scores.sub_(normalizers[part, None])
            # d logprob / d logits = one_hot - probabilities, over the temperature.
            scale = grad[part] / temperatures[part].to(grad.dtype)
            slopes = scores.exp().mul_(-scale[:, None])
            slopes.scatter_add_(1, targets[part, None], scale[:, None])
            result[part] = slopes.to(weight.dtype) @ weight
        return result, None, None, None, None, None, None
