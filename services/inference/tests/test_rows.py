"""Sampling one row: truncation, the draw, penalties."""

import pytest
import torch

from opentinker_inference.domain.sampling import SamplingParams
from opentinker_inference.engine.rows import RowSampler, draw, truncate, uniform

LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]))


def kept(row: torch.Tensor) -> list[int]:
    return torch.isfinite(row).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p", "want"),
    [
        (0.0, -1, 1.0, [0, 1, 2, 3, 4]),
        (0.0, 2, 1.0, [0, 1]),
        (0.0, 4, 1.0, [0, 1, 2, 3, 4]),  # a tie at the last place
        (0.0, -1, 0.5, [0]),
        (0.0, -1, 0.51, [0, 1]),
        (0.0, -1, 0.8, [0, 1, 2]),
        (0.0, -1, 1e-6, [0]),
        (0.3, -1, 1.0, [0, 1]),
        (0.3, -1, 0.9, [0, 1]),
        (0.0, 3, 0.7, [0, 1]),
    ],
)
def test_truncate(min_p: float, top_k: int, top_p: float, want: list[int]) -> None:
    assert kept(truncate(LOGITS, min_p, top_k, top_p)) == want


def test_draw_is_the_inverse_of_the_cumulative_function() -> None:
    logprobs = torch.log_softmax(LOGITS, dim=-1)
    points = [0.0, 0.49, 0.51, 0.74, 0.76, 0.88, 0.95, 1 - 2**-53]
    assert [draw(logprobs, u) for u in points] == [0, 0, 1, 1, 2, 3, 4, 4]


def test_draw_never_takes_a_token_of_probability_zero() -> None:
    logprobs = torch.log_softmax(torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]), dim=-1)
    assert {draw(logprobs, u) for u in (0.0, 0.3, 0.5, 0.9, 1 - 2**-53)} == {1, 3}


def test_uniform_depends_on_seed_and_step_only() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    values = [uniform(seed, step) for seed in range(40) for step in range(40)]
    assert len(set(values)) == 1600
    assert all(0 <= value < 1 for value in values)
    assert sum(values) / 1600 == pytest.approx(0.5, abs=0.03)
    # Golden: the stream may never change within a version of the engine's contract.
    assert uniform(0, 0) == pytest.approx(0.9837839079809996, abs=1e-15)


def test_frequencies_follow_the_distribution() -> None:
    counts = [0] * 5
    for seed in range(4000):
        counts[RowSampler(SamplingParams(), seed, (), ()).pick(LOGITS).token_id] += 1
    for count, want in zip(counts, (0.5, 0.25, 0.125, 0.0625, 0.0625), strict=True):
        assert count / 4000 == pytest.approx(want, abs=0.03)


def test_penalties_as_vllm_defines_them() -> None:
    # Repetition divides positive and multiplies negative logits of prompt and completion; frequency and
    # presence subtract for the completion only.
    logits = torch.tensor([2.0, -1.0, 1.0, 0.5, 0.0])
    sampler = RowSampler(SamplingParams(temperature=0.0, repetition_penalty=2.0), 0, (1, 3), ())
    assert sampler.pick(logits).token_id == 0
    second = sampler._adjusted(logits)
    assert second.tolist() == [1.0, -2.0, 1.0, 0.25, 0.0]
    params = SamplingParams(temperature=0.0, frequency_penalty=0.25, presence_penalty=0.5)
    sampler = RowSampler(params, 0, (1, 3), ())
    sampler.pick(logits)
    sampler.pick(logits)
    assert sampler._adjusted(logits).tolist() == [1.0, -1.0, 1.0, 0.5, 0.0]


def test_bad_word_of_two_tokens() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0])
    sampler = RowSampler(SamplingParams(temperature=0.0), 0, (), [(0, 0)])
    assert [sampler.pick(logits).token_id for _ in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, (0, ())),
        ({"top_k": 5}, (0, ())),  # the whole vocabulary: nothing is cut off
        ({"top_k": 2}, (2, (0, 1))),
        ({"top_p": 0.8}, (3, (0, 1, 2))),
        ({"min_p": 0.3}, (2, (0, 1))),
        ({"top_p": 0.8, "temperature": 0.0}, (0, ())),  # its logprob is of all tokens
    ],
)
def test_the_support_is_what_can_be_drawn(
    options: dict[str, float], want: tuple[int, tuple[int, ...]]
) -> None:
    params = SamplingParams(return_support=True, **options)  # type: ignore[arg-type]
    for seed in range(20):
        pick = RowSampler(params, seed, (), ()).pick(LOGITS)
        assert (pick.support_size, pick.support) == want
        assert not want[0] or pick.token_id in pick.support


def test_a_support_that_is_too_large_is_not_listed() -> None:
    params = SamplingParams(return_support=True, top_p=0.999)
    pick = RowSampler(params, 0, (), ()).pick(torch.linspace(0, 1, 1000))
    assert (pick.support_size, pick.support) == (-1, ())


def test_raw_logprobs_are_before_everything_else() -> None:
    params = SamplingParams(
        raw_logprobs=True, temperature=0.5, top_k=1, logit_bias=((3, 50.0),), repetition_penalty=2.0
    )
    pick = RowSampler(params, 0, (3,), ()).pick(LOGITS)
    assert pick.token_id == 3
    assert pick.logprob == 0.0
    assert pick.raw_logprob == pytest.approx(float(LOGITS[3]), abs=1e-6)
