"""Train samples as arrays, and what makes one acceptable.

Per-token arrays have the length of the token ids; entry i belongs to token i (its logprob given what precedes
it), so entry 0 can never be trained on. Positions outside the loss mask may hold anything, -inf and NaN
included: they are never read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.losses import Component, CrossEntropy
from opentinkerapi.runtime.reasons import Reason

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sample:
    """One row: arrays of the same length L."""

    token_ids: Ints
    loss_mask: Mask
    behavior_logprobs: Floats | None = None
    advantages: Floats | None = None
    weights: Floats | None = None
    """None: 1 everywhere."""
    temperature: float = 1.0
    components: frozenset[str] | None = None
    """Names of the components that apply; None: all."""
    sample_id: str = ""

    @property
    def length(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def has(self, component: Component) -> bool:
        """Whether the component applies to this row."""
        return self.components is None or component.name in self.components

    def is_inert(self, components: Sequence[Component]) -> bool:
        """Whether no component can contribute a gradient: each one's advantages or weights are all 0."""
        return all(self._silent(component) for component in components if self.has(component))

    def _silent(self, component: Component) -> bool:
        scale = self.weights if isinstance(component.loss, CrossEntropy) else self.advantages
        return scale is not None and not np.any(scale[self.loss_mask])


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model takes."""

    vocab_size: int
    max_sequence_tokens: int


def check_samples(
    samples: Sequence[Sample], limits: Limits, components: Sequence[Component] | None = None
) -> None:
    """ServiceError INVALID_SAMPLE (metadata has the index) or NO_TRAINABLE_TOKENS.

    With `components` (a ForwardBackward) the arrays that these need must be there, and finite where the mask
    is 1.
    """
    names = {component.name for component in components or ()}
    for index, sample in enumerate(samples):
        _check_shape(index, sample, limits)
        if components is None:
            continue
        unknown = (sample.components or frozenset()) - names
        if unknown:
            raise invalid(index, sample, f"component {min(unknown)!r} is not among the request's losses")
        _check_arrays(index, sample, [component for component in components if sample.has(component)])
    if not any(sample.loss_mask.any() for sample in samples):
        raise ServiceError(
            Reason.NO_TRAINABLE_TOKENS, "no sample has a token with loss_mask 1; there is nothing to train on"
        )


def invalid(index: int, sample: Sample | None, text: str) -> ServiceError:
    """The error for the sample at `index`."""
    name = f" ({sample.sample_id})" if sample is not None and sample.sample_id else ""
    return ServiceError(
        Reason.INVALID_SAMPLE,
        f"sample {index}{name}: {text}",
        field=f"samples[{index}]",
        metadata={"index": index},
    )


def _check_shape(index: int, sample: Sample, limits: Limits) -> None:
    length = sample.length
    if length < 2:
        raise invalid(index, sample, f"has {length} tokens; at least 2 are needed")
    if length > limits.max_sequence_tokens:
        raise invalid(
            index, sample, f"has {length} tokens; this server takes at most {limits.max_sequence_tokens}"
        )
    if sample.loss_mask.shape[0] != length:
        raise invalid(index, sample, f"loss_mask has {sample.loss_mask.shape[0]} entries for {length} tokens")
    for name in ("behavior_logprobs", "advantages", "weights"):
        array = getattr(sample, name)
        if array is not None and array.shape[0] != length:
            raise invalid(index, sample, f"{name} has {array.shape[0]} entries for {length} tokens")
    low, high = int(sample.token_ids.min()), int(sample.token_ids.max())
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        raise invalid(index, sample, f"token id {bad} is outside the vocabulary of {limits.vocab_size}")
    if sample.loss_mask[0]:
        raise invalid(index, sample, "loss_mask[0] is 1: nothing precedes the first token")
    if not (math.isfinite(sample.temperature) and sample.temperature > 0):
        raise invalid(
            index, sample, f"sampling_temperature is {sample.temperature}; it must be a positive number"
        )


def _check_arrays(index: int, sample: Sample, components: Sequence[Component]) -> None:
    wanted: list[tuple[str, Floats | None]] = []
    if any(component.needs_behavior for component in components):
        wanted += [("behavior_logprobs", sample.behavior_logprobs), ("advantages", sample.advantages)]
        if sample.loss_mask.any():
            for name, array in wanted:
                if array is None:
                    raise invalid(index, sample, f"policy losses need {name}")
    if any(isinstance(component.loss, CrossEntropy) for component in components):
        wanted.append(("weights", sample.weights))
    for name, array in wanted:
        if array is None:
            continue
        wrong = np.flatnonzero(sample.loss_mask & ~np.isfinite(array))
        if wrong.size:
            at = int(wrong[0])
            raise invalid(index, sample, f"{name}[{at}] is {array[at]} where loss_mask is 1")
