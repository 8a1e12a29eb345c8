"""Losses that only the user knows: the gradient of two passes is that of the function itself."""

from typing import Any

import numpy as np
import pytest
from client.tests.doubles.cluster import World
from client.tests.doubles.trainer import rows_of

import opentinker as ot
from opentinker import errors
from opentinker.training.samples import TrainSample
from opentinkerapi.runtime.tensors import unpack_floats, unpack_ids

VOCABULARY = 5
ROWS = [
    TrainSample([0, 1, 2, 3], [0, 0, 1, 1]),
    TrainSample([0, 4, 1], [0, 1, 1]),
    TrainSample([2, 2, 0, 4, 1], [0, 1, 0, 1, 1]),
]


class Bigrams:
    """A model of logits W [V, V]: the next token depends on the last. Differentiated by hand."""

    def __init__(self, seed: int = 0) -> None:
        self.weights = np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY))

    def logprobs(self, ids: Any, mask: Any) -> np.ndarray[Any, Any]:
        table = self.weights - np.log(np.exp(self.weights).sum(axis=1, keepdims=True))
        result = np.zeros(len(ids))
        result[1:] = table[np.asarray(ids)[:-1], np.asarray(ids)[1:]]
        return result * np.asarray(mask)

    def cross_entropy_gradient(self, samples: list[Any], denominator: float) -> np.ndarray[Any, Any]:
        """d(sum -w logprob / denominator)/dW, as a trainer computes it."""
        probabilities = np.exp(self.weights)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        gradient = np.zeros_like(self.weights)
        for sample in samples:
            ids = unpack_ids(sample.chunks[0].tokens.token_ids)
            for at, (weight, bit) in enumerate(
                zip(unpack_floats(sample.weights), sample.loss_mask, strict=True)
            ):
                if bit:
                    gradient[ids[at - 1]] += weight * probabilities[ids[at - 1]] / denominator
                    gradient[ids[at - 1], ids[at]] -= weight / denominator
        return gradient


def entangled(logprobs: list[Any]) -> tuple[float, list[Any]]:
    """C = log(1 + exp(-(s0 - s1))) + (mean of s2)^2 with s the sums: it couples tokens and rows."""
    margin = logprobs[0].sum() - logprobs[1].sum()
    slope = -1 / (1 + np.exp(margin))
    third = logprobs[2].sum() / 3
    masks = [np.asarray(row.loss_mask) for row in ROWS]
    gradients = [slope * masks[0], -slope * masks[1], 2 * third / 3 * masks[2]]
    return float(np.log1p(np.exp(-margin)) + third**2), gradients


@pytest.fixture
def policy(doubles: World) -> ot.Policy:
    return doubles.cluster.create_policy("tiny").result()


def test_the_gradient_is_that_of_the_function(doubles: World, policy: ot.Policy) -> None:
    model = Bigrams()
    doubles.trainer.score = lambda name, start, sample: model.logprobs(
        unpack_ids(sample.chunks[0].tokens.token_ids), np.frombuffer(sample.loss_mask, np.uint8)
    )
    done = policy.forward_backward_custom(ROWS, entangled).result()
    forward, backward = doubles.trainer.ran
    assert (forward[1], backward[1]) == ("Forward", "ForwardBackward")
    start = backward[2][0]
    assert [term.WhichOneof("loss") for term in start.losses] == ["cross_entropy"]
    gradient = model.cross_entropy_gradient(rows_of(backward[2]), start.losses[0].denominator)

    def loss() -> float:
        return entangled([model.logprobs(row.token_ids, row.loss_mask) for row in ROWS])[0]

    assert done.loss == pytest.approx(loss(), abs=1e-6)
    numeric = np.zeros_like(gradient)
    for place in np.ndindex(*numeric.shape):
        kept = model.weights[place]
        model.weights[place] = kept + 1e-5
        high = loss()
        model.weights[place] = kept - 1e-5
        numeric[place] = (high - loss()) / 2e-5
        model.weights[place] = kept
    assert np.abs(numeric).max() > 0.1
    np.testing.assert_allclose(gradient, numeric, atol=1e-6)


def test_it_accumulates_and_steps_like_any_other(doubles: World, policy: ot.Policy) -> None:
    async def loop() -> int:
        await policy.forward_backward_custom(ROWS, entangled)
        await policy.forward_backward_custom(ROWS[:2], lambda lp: (0.0, [np.zeros(len(row)) for row in lp]))
        return (await policy.optim_step(ot.AdamW())).step

    import asyncio

    assert asyncio.run(loop()) == 1
    steps = [messages[0] for _, method, messages in doubles.trainer.ran if method == "OptimStep"]
    assert list(steps[0].forward_backward_seqs) == [2, 4]
    assert not steps[0].denominators


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((float("nan"), [np.zeros(4), np.zeros(3)]), "the custom loss is nan"),
        ((0.0, [np.zeros(4)]), "1 gradients for 2 rows"),
        ((0.0, [np.zeros(4), np.zeros(4)]), r"gradients\[1\].*shape \(4,\) for 3"),
        ((0.0, [np.zeros(4), np.array([0, np.inf, 0])]), r"gradients\[1\].*not finite"),
        ((0.0, [np.array([0, 1, 0, 0]), np.zeros(3)]), r"gradients\[0\].*not trained on"),
    ],
)
def test_what_a_function_may_not_give(doubles: World, policy: ot.Policy, answer: Any, said: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=said):
        policy.forward_backward_custom(ROWS[:2], lambda logprobs: answer).result()
    assert [method for _, method, _ in doubles.trainer.ran] == ["Forward"]


def test_what_the_function_raises_is_raised(doubles: World, policy: ot.Policy) -> None:
    def broken(logprobs: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        policy.forward_backward_custom(ROWS, broken).result()
    with pytest.raises(errors.IncompleteBatch):
        policy.optim_step(ot.AdamW()).result()
