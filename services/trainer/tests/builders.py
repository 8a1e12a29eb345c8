"""Samples and comparisons that several tests use."""

import numpy as np
from torch import Tensor

from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.engine.core import TorchEngine

VOCABULARY = 256


def sample(
    prompt: int,
    answer: int,
    seed: int,
    *,
    prompt_seed: int | None = None,
    advantage: float = 1.0,
    temperature: float = 1.0,
) -> Sample:
    """A row of random tokens: `prompt` untrained ones, then `answer` trained ones."""
    head = np.random.default_rng(seed if prompt_seed is None else prompt_seed)
    tail = np.random.default_rng(seed + 1000)
    length = prompt + answer
    ids = np.concatenate([head.integers(1, VOCABULARY, prompt), tail.integers(1, VOCABULARY, answer)])
    mask = np.arange(length) >= prompt
    behavior = np.where(mask, -5.5 + 0.3 * tail.standard_normal(length), 0.0)
    return Sample(
        token_ids=ids.astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=behavior.astype(np.float32),
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
        temperature=temperature,
    )


def ragged_batch() -> list[Sample]:
    """Eight rows: a group that shares its prompt, others of ragged lengths, several temperatures."""
    group = [
        sample(12, 2 + 3 * i, i, prompt_seed=7, advantage=0.5 - 0.4 * i, temperature=0.7) for i in range(4)
    ]
    others = [sample(3 + 5 * i, 1 + 4 * i, 50 + i, advantage=(-1.0) ** i) for i in range(4)]
    return [*group, *others]


def gradient_of(engine: TorchEngine, policy: str) -> dict[str, Tensor]:
    """The accumulated gradient of components with known denominators."""
    return engine._policies[policy].gradients[""]


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).detach().abs().max()) for name in first)


def largest(values: dict[str, Tensor]) -> float:
    return max(float(value.detach().abs().max()) for value in values.values())
