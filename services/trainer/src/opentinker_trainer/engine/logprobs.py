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
    values: Tensor | None = None
    """[N], differentiable: the value head at the column that predicts the token; None without a head."""


class LowRank(NamedTuple):
    """What an adapter of the output layer adds to the logits: inner [N, R] @ outer [V, R]^T."""

    inner: Tensor
    outer: Tensor


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    *,
    chunk: int,
    entropy: bool,
    low_rank: LowRank | None = None,
) -> TokenScores:
    """Score `targets` [N] under softmax((hidden [N, H] @ weight [V, H]^T + bias) / temperatures [N]).

    Differentiable with respect to hidden, weight, bias and the low-rank part, whichever requires a gradient.
    """
    inner, outer = low_rank if low_rank is not None else (None, None)
    logprobs, entropies = _TokenScores.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, inner, outer, targets, temperatures, chunk, entropy
    )
    return TokenScores(logprobs, entropies)


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inner: Tensor | None,
    outer: Tensor | None,
    temperatures: Tensor,
) -> Tensor:
    logits = functional.linear(hidden, weight, bias).to(accumulator(weight.dtype))
    if inner is not None:
        logits = logits + functional.linear(inner, outer)
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
        inner: Tensor | None,
        outer: Tensor | None,
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
            logits = _logits(hidden[part], weight, bias, _rows(inner, part), outer, temperatures[part])
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
        ctx.save_for_backward(hidden, weight, bias, inner, outer, targets, temperatures, normalizers, kept)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, inner, outer, targets, temperatures, normalizers, kept = ctx.saved_tensors
        sources = (hidden, weight, bias, inner, outer)
        needed = [
            source is not None and wanted
            for source, wanted in zip(sources, ctx.needs_input_grad, strict=False)
        ]
        # What sums over tokens is accumulated in float32, whatever the weights are stored in.
        of_hidden, of_weight, of_bias, of_inner, of_outer = (
            torch.zeros_like(source, dtype=accumulator(source.dtype)) if wanted else None
            for source, wanted in zip(sources, needed, strict=True)
        )
        count = hidden.shape[0]
        for start in range(0, count, ctx.chunk):
            part = slice(start, start + ctx.chunk)
            if kept is not None:
                scores = kept
            else:
                scores = _logits(hidden[part], weight, bias, _rows(inner, part), outer, temperatures[part])
                scores = scores.sub_(normalizers[part, None])
            # d logprob / d logits = one_hot - probabilities, over the temperature.
            scale = grad[part] / temperatures[part].to(grad.dtype)
            slopes = scores.exp().mul_(-scale[:, None])
            slopes.scatter_add_(1, targets[part, None], scale[:, None])
            if of_inner is not None:
                of_inner[part] = slopes.to(outer.dtype) @ outer
            if of_outer is not None:
                of_outer += slopes.to(inner.dtype).T @ inner[part]
            if of_bias is not None:
                of_bias += slopes.sum(0)
            slopes = slopes.to(weight.dtype)
            if of_hidden is not None:
                of_hidden[part] = slopes @ weight
            if of_weight is not None:
                of_weight += slopes.T @ hidden[part]
        gradients = (of_hidden, of_weight, of_bias, of_inner, of_outer)
        return (
            *(
                None if source is None or gradient is None else gradient.to(source.dtype)
                for source, gradient in zip(sources, gradients, strict=True)
            ),
            *(None,) * 4,
        )


def _rows(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor[part]
