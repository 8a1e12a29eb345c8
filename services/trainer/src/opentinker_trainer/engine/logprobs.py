"""Logprobs of chosen tokens from hidden states, in chunks, never a whole [B, L, V] array of logits.

Only rows that predict a loss token reach the output layer, `chunk` of them at a time, so the peak is a few
arrays of [chunk, V]. Where the output layer is frozen the slope of each logprob with respect to its hidden
state [N, H] is computed along with it, and the backward pass only scales it. Where the output layer is
trained, or the entropy is part of the loss, the backward pass computes each chunk's logits again instead of
keeping them (kept only where one chunk holds everything).
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from opentinker_trainer.engine.numerics import accumulator

_NO_MASS = -1e6
"""Stands for the logprob of what has probability 0 where the two are multiplied: a -inf would make nan of it,
and the lowest float becomes -inf with the next factor.
"""


class TokenScores(NamedTuple):
    """Of N tokens, in float32 (float64 for float64 models)."""

    logprobs: Tensor
    """[N], differentiable."""
    entropy: Tensor
    """[N], differentiable where that was asked for; empty where it was not asked for at all."""
    values: Tensor | None = None
    """[N], differentiable: the value head at the column that predicts the token; None without a head."""


class LowRank(NamedTuple):
    """What an adapter of the output layer adds to the logits: inner [N, R] @ outer [V, R]^T."""

    inner: Tensor
    outer: Tensor


class Kept(NamedTuple):
    """What N tokens were chosen among, M ids in all; everything else counts as impossible."""

    starts: NDArray[np.int64]
    """[N + 1]: where the ids of each token begin, and the end. A token without ids has the vocabulary."""
    ids: Tensor
    """[M]"""

    def restrict(self, logits: Tensor, part: slice) -> Tensor:
        """The logits [n, V] of the tokens of `part`, in place."""
        starts = self.starts[part.start : part.start + len(logits) + 1]
        sizes = torch.from_numpy(np.diff(starts)).to(logits.device)
        outside = (sizes > 0)[:, None].repeat(1, logits.shape[1])
        owners = torch.repeat_interleave(torch.arange(len(logits), device=logits.device), sizes)
        outside[owners, self.ids[starts[0] : starts[-1]]] = False
        return logits.masked_fill_(outside, -torch.inf)


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    *,
    chunk: int,
    entropy: bool,
    entropy_gradient: bool = False,
    low_rank: LowRank | None = None,
    kept: Kept | None = None,
) -> TokenScores:
    """Score `targets` [N] under softmax((hidden [N, H] @ weight [V, H]^T + bias) / temperatures [N]), over
    the ids in `kept` where a token has some; its target must be among them.

    Differentiable with respect to hidden, weight, bias and the low-rank part, whichever requires a gradient;
    the entropy only with `entropy_gradient`.
    """
    inner, outer = low_rank if low_rank is not None else (None, None)
    trained = [part for part in (weight, bias, outer) if part is not None and part.requires_grad]
    if torch.is_grad_enabled() and (trained or entropy_gradient):
        logprobs, entropies = _TokenScores.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, inner, outer, targets, temperatures, kept, chunk, entropy, entropy_gradient
        )
    else:
        wanted = torch.is_grad_enabled()
        logprobs, entropies = _FrozenScores.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, inner, outer, targets, temperatures, kept, chunk, entropy, wanted
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
    if inner is not None and outer is not None:
        logits = logits + functional.linear(inner, outer)
    if bool((temperatures != 1).any()):
        logits = logits / temperatures[:, None]
    return logits


class _FrozenScores(torch.autograd.Function):
    """Weight, bias and outer part take no gradient; hidden and inner part may."""

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
        kept: Kept | None,
        chunk: int,
        entropy: bool,
        wanted: bool,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        dtype = accumulator(weight.dtype)
        logprobs = torch.empty(count, dtype=dtype, device=hidden.device)
        entropies = torch.empty(count if entropy else 0, dtype=dtype, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if wanted and hidden.requires_grad else None
        of_inner = torch.empty_like(inner) if wanted and inner is not None and inner.requires_grad else None
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias, _rows(inner, part), outer, temperatures[part])
            if kept is not None:
                kept.restrict(logits, part)
            # A logit of -inf has probability 0 and adds nothing to the entropy.
            logits.sub_(logits.amax(-1, keepdim=True)).clamp_(min=_NO_MASS)
            chosen = logits.gather(1, targets[part, None])[:, 0]
            needed = entropy or of_hidden is not None or of_inner is not None
            weights = logits.exp() if needed else logits.exp_()
            total = weights.sum(-1)
            log_total = total.log()
            logprobs[part] = chosen - log_total
            if entropy:
                mean = torch.bmm(weights[:, None], logits[:, :, None])[:, 0, 0] / total
                entropies[part] = log_total - mean
            if of_hidden is None and of_inner is None:
                continue
            # d logprob / d logits = one_hot - probabilities, over the temperature; here with the other sign.
            slopes = weights.div_(total[:, None])
            slopes.scatter_add_(1, targets[part, None], slopes.new_full((len(total), 1), -1.0))
            scale = -1.0 / temperatures[part, None]
            if of_inner is not None and outer is not None:
                of_inner[part] = (slopes.to(outer.dtype) @ outer) * scale
            if of_hidden is not None:
                of_hidden[part] = (slopes.to(weight.dtype) @ weight) * scale
        ctx.save_for_backward(of_hidden, of_inner)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_inner = ctx.saved_tensors
        of_hidden, of_inner = (
            None if slope is None else (slope * grads[0][:, None]).to(slope.dtype)
            for slope in (of_hidden, of_inner)
        )
        return of_hidden, None, None, of_inner, *(None,) * 7


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
        kept: Kept | None,
        chunk: int,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        dtype = accumulator(weight.dtype)
        logprobs = torch.empty(count, dtype=dtype, device=hidden.device)
        entropies = torch.empty(count if entropy else 0, dtype=dtype, device=hidden.device)
        normalizers = torch.empty(count, dtype=dtype, device=hidden.device)
        whole: Tensor | None = None
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias, _rows(inner, part), outer, temperatures[part])
            if kept is not None:
                kept.restrict(logits, part)
            total = torch.logsumexp(logits, dim=-1)
            normalizers[part] = total
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - total
            if entropy or count <= chunk:
                scores = logits.sub_(total[:, None])
                if entropy:
                    # A logit of -inf has probability 0 and adds nothing.
                    entropies[part] = -(scores.exp() * scores.clamp_min(_NO_MASS)).sum(-1)
                if count <= chunk:
                    whole = scores
        ctx.save_for_backward(
            hidden, weight, bias, inner, outer, targets, temperatures, normalizers, entropies, whole
        )
        ctx.chunk, ctx.kept = chunk, kept
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, inner, outer, *rest = ctx.saved_tensors
        targets, temperatures, normalizers, entropies, whole = rest
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
        # The logits were divided by the temperatures.
        of_logprobs, of_entropies = (
            torch.zeros_like(normalizers) if grad is None else grad / temperatures.to(grad.dtype)
            for grad in grads
        )
        count = hidden.shape[0]
        for start in range(0, count, ctx.chunk):
            part = slice(start, start + ctx.chunk)
            if whole is not None:
                scores = whole
            else:
                scores = _logits(hidden[part], weight, bias, _rows(inner, part), outer, temperatures[part])
                if ctx.kept is not None:
                    ctx.kept.restrict(scores, part)
                scores = scores.sub_(normalizers[part, None])
            slopes = scores.exp()
            # d logprob / d logits = one_hot - probabilities,
            # d entropy / d logits = -probabilities * (log probabilities + entropy).
            if grads[1] is None:
                slopes.mul_(-of_logprobs[part, None])
            else:
                factor = scores.clamp_min(_NO_MASS) + entropies[part, None]
                factor.mul_(of_entropies[part, None]).add_(of_logprobs[part, None])
                slopes.mul_(factor).neg_()
            slopes.scatter_add_(1, targets[part, None], of_logprobs[part, None])
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
            *(None,) * 6,
        )


def _rows(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor[part]
