"""The output layer's gradients: trained weights, biases and adapters of it, chunked or not."""

import pytest
import torch
from torch import Tensor

from opentinker_trainer.engine.logprobs import LowRank, token_scores


def leaf(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("chunk", [3, 100])
def test_gradients_of_everything_in_the_output_layer(chunk: int) -> None:
    """Against finite differences; with a frozen weight and no bias, too."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = leaf(generator, 7, 5), leaf(generator, 11, 5), leaf(generator, 11)
    inner, outer = leaf(generator, 7, 2), leaf(generator, 11, 2)
    temperatures = torch.rand(7, generator=generator, dtype=torch.float64) + 0.5

    def trained(hidden: Tensor, weight: Tensor, bias: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        scores = token_scores(
            hidden,
            weight,
            bias,
            torch.arange(7),
            temperatures,
            chunk=chunk,
            entropy=True,
            low_rank=LowRank(inner, outer),
        )
        return scores.logprobs

    def frozen(hidden: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        return trained(hidden, weight.detach(), bias.detach(), inner, outer)

    assert torch.autograd.gradcheck(trained, (hidden, weight, bias, inner, outer))
    assert torch.autograd.gradcheck(frozen, (hidden, inner, outer))


def test_a_low_rank_part_is_a_change_of_the_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = leaf(generator, 6, 5), leaf(generator, 9, 5)
    a, b = leaf(generator, 2, 5), leaf(generator, 9, 2)
    targets, temperatures = torch.arange(6), torch.full((6,), 0.7, dtype=torch.float64)
    adapted = token_scores(
        hidden,
        weight,
        None,
        targets,
        temperatures,
        chunk=4,
        entropy=True,
        low_rank=LowRank(hidden @ a.T * 2.0, b),
    )
    merged = token_scores(hidden, weight + 2.0 * b @ a, None, targets, temperatures, chunk=4, entropy=True)
    torch.testing.assert_close(adapted.logprobs, merged.logprobs)
    torch.testing.assert_close(adapted.entropy, merged.entropy)
