"""Chunked logprobs against log_softmax, forwards and backwards, and what they keep in memory."""

import math

import numpy as np
import pytest
import torch
from services.trainer.tests import golden

from opentinker_trainer.engine.logprobs import Kept, LowRank, token_scores


def case(count: int = 10, width: int = 8, vocabulary: int = 40) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, width, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=torch.float64, generator=generator)
    bias = torch.randn(vocabulary, dtype=torch.float64, generator=generator)
    targets = torch.randint(vocabulary, (count,), generator=generator)
    temperatures = torch.linspace(0.5, 1.5, count, dtype=torch.float64)
    return hidden, weight, bias, targets, temperatures


@pytest.mark.parametrize("chunk", [1, 3, 10, 64])
def test_values_entropy_and_gradient_equal_log_softmax(chunk: int) -> None:
    hidden, weight, bias, targets, temperatures = case()
    scale = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    scores = token_scores(hidden, weight, bias, targets, temperatures, chunk=chunk, entropy=True)
    (gradient,) = torch.autograd.grad((scores.logprobs * scale).sum(), hidden)

    expected = torch.log_softmax((hidden @ weight.T + bias) / temperatures[:, None], -1)
    chosen = expected.gather(1, targets[:, None])[:, 0]
    (expected_gradient,) = torch.autograd.grad((chosen * scale).sum(), hidden)
    torch.testing.assert_close(scores.logprobs, chosen, atol=1e-12, rtol=0)
    torch.testing.assert_close(scores.entropy, -(expected.exp() * expected).sum(-1), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("of", ["entropy", "both"])
def test_entropy_has_a_gradient_where_it_is_asked_for(chunk: int, of: str) -> None:
    """B115: chunk by chunk, with respect to the hidden states and every trained part of the output layer."""
    hidden, weight, bias, targets, temperatures = case()
    generator = torch.Generator().manual_seed(1)
    inner = torch.randn(10, 2, dtype=torch.float64, generator=generator)
    outer = torch.randn(40, 2, dtype=torch.float64, generator=generator)
    sources = [hidden, *(each.requires_grad_() for each in (weight, bias, inner, outer))]
    scale = torch.linspace(-1, 2, 10, dtype=torch.float64)
    scores = token_scores(
        hidden,
        weight,
        bias,
        targets,
        temperatures,
        chunk=chunk,
        entropy=True,
        entropy_gradient=True,
        low_rank=LowRank(inner, outer),
    )
    logprobs = torch.log_softmax((hidden @ weight.T + bias + inner @ outer.T) / temperatures[:, None], -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(scores.entropy, entropy, atol=1e-12, rtol=0)
    found, expected = (scores.entropy * scale).sum(), (entropy * scale).sum()
    if of == "both":
        found, expected = found + scores.logprobs.sum(), expected + chosen.sum()
    for one, other in zip(
        torch.autograd.grad(found, sources), torch.autograd.grad(expected, sources), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


def test_entropy_has_no_gradient_where_it_is_not_asked_for() -> None:
    hidden, weight, bias, targets, temperatures = case()
    scores = token_scores(hidden, weight, bias, targets, temperatures, chunk=3, entropy=True)
    assert scores.logprobs.requires_grad
    assert not scores.entropy.requires_grad


def test_temperature_is_applied_to_the_logits() -> None:
    """B51, T1 of the reference: logits 2, 1, 0, -1 and token 1 at temperature 0.7."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    identity = torch.eye(4, dtype=torch.float64)
    for temperature, expected in [(1.0, golden.T1_RAW), (0.7, golden.T1_SCALED)]:
        scores = token_scores(
            logits,
            identity,
            None,
            torch.tensor([1]),
            torch.tensor([temperature], dtype=torch.float64),
            chunk=4,
            entropy=False,
        )
        assert scores.logprobs.item() == pytest.approx(expected, abs=1e-10)


def test_top_p_is_applied_over_the_kept_ids() -> None:
    """B52, T1 of the reference: top_p 0.9 kept tokens 0 and 1, and the ratio to the sampler is 1."""
    scores = token_scores(
        torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64),
        torch.eye(4, dtype=torch.float64),
        None,
        torch.tensor([1]),
        torch.tensor([0.7], dtype=torch.float64),
        chunk=4,
        entropy=False,
        kept=Kept(np.array([0, 2]), torch.tensor([1, 0])),
    )
    assert scores.logprobs.item() == pytest.approx(golden.T1_PROCESSED, abs=1e-10)
    forgotten = math.exp(golden.T1_SCALED - golden.T1_PROCESSED)
    assert forgotten == pytest.approx(golden.T1_KEPT_MASS, abs=1e-10)


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_support_is_a_softmax_over_its_ids(chunk: int, trained: bool, entropy_gradient: bool) -> None:
    """B52: values, entropy and gradient of every path equal those of a softmax over the kept logits alone;
    tokens without a set keep the vocabulary.
    """
    hidden, weight, bias, targets, temperatures = case()
    weight.requires_grad_(trained)
    sources = [hidden, weight] if trained else [hidden]
    random = np.random.default_rng(0)
    sets: list[list[int]] = []
    for number, target in enumerate(targets.tolist()):
        others = [token for token in random.permutation(40).tolist() if token != target]
        sets.append([] if number % 3 == 2 else [*others[: 4 * number], target])
    kept = Kept(np.cumsum([0, *map(len, sets)]), torch.tensor([token for each in sets for token in each]))
    scores = token_scores(
        hidden,
        weight,
        bias,
        targets,
        temperatures,
        chunk=chunk,
        entropy=True,
        entropy_gradient=entropy_gradient,
        kept=kept,
    )
    logits = (hidden @ weight.T + bias) / temperatures[:, None]
    chosen, entropies = [], []
    for row, target, ids in zip(logits, targets.tolist(), sets, strict=True):
        own = ids or list(range(40))
        logprobs = torch.log_softmax(row[torch.tensor(own)], -1)
        chosen.append(logprobs[own.index(target)])
        entropies.append(-(logprobs.exp() * logprobs).sum())
    expected, entropy = torch.stack(chosen), torch.stack(entropies)
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(scores.entropy, entropy, atol=1e-12, rtol=0)
    # Weights beyond 1, by which the lowest float would become infinite and nan with a probability of 0.
    scale = torch.linspace(-3, 5, 10, dtype=torch.float64)
    found, wanted = (scores.logprobs * scale).sum(), (expected * scale).sum()
    if entropy_gradient:
        found, wanted = found + (scores.entropy * scale).sum(), wanted + (entropy * scale).sum()
    for one, other in zip(
        torch.autograd.grad(found, sources), torch.autograd.grad(wanted, sources), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


def test_a_logit_of_minus_infinity_has_no_entropy() -> None:
    scores = token_scores(
        torch.ones(1, 1, dtype=torch.float64),
        torch.tensor([[0.0], [-torch.inf]], dtype=torch.float64),
        None,
        torch.tensor([0]),
        torch.ones(1, dtype=torch.float64),
        chunk=1,
        entropy=True,
    )
    assert scores.logprobs.item() == 0.0
    assert scores.entropy.item() == 0.0


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_between_passes_no_logits_are_kept(entropy_gradient: bool) -> None:
    """B115: what autograd saves between the passes does not grow with vocabulary times tokens."""
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    vocabulary, width, count, chunk = 4096, 16, 512, 64
    hidden = torch.randn(count, width, requires_grad=True)
    weight = torch.randn(vocabulary, width)
    targets = torch.randint(vocabulary, (count,))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = token_scores(
            hidden,
            weight,
            None,
            targets,
            torch.ones(count),
            chunk=chunk,
            entropy=True,
            entropy_gradient=entropy_gradient,
        )
    assert max(saved) <= max(vocabulary * width, count * width)
    (scores.logprobs.sum() + scores.entropy.sum() * entropy_gradient).backward()
    assert hidden.grad is not None
