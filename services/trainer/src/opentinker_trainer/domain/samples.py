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
from opentinker_trainer.domain.images import ImageCheck, SampleImage
from opentinker_trainer.domain.losses import Component
from opentinker_trainer.domain.support import Support
from opentinkerapi.runtime.images import ImageSettings
from opentinkerapi.runtime.reasons import Reason

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

ARRAYS = (
    "behavior_logprobs",
    "advantages",
    "weights",
    "proximal_logprobs",
    "reference_logprobs",
    "teacher_logprobs",
    "returns",
    "old_values",
)
"""The per-token arrays of numbers that a sample may carry."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One row: arrays of the same length L."""

    token_ids: Ints
    loss_mask: Mask
    behavior_logprobs: Floats | None = None
    advantages: Floats | None = None
    weights: Floats | None = None
    """Factor of each token's loss in every component. None: 1 everywhere."""
    proximal_logprobs: Floats | None = None
    """None: the ratio of policy losses is taken to the behavior logprobs."""
    reference_logprobs: Floats | None = None
    teacher_logprobs: Floats | None = None
    returns: Floats | None = None
    old_values: Floats | None = None
    temperature: float = 1.0
    support: Support | None = None
    """What each token was chosen among. None: all of the vocabulary."""
    components: frozenset[str] | None = None
    """Names of the components that apply; None: all."""
    sample_id: str = ""
    images: tuple[SampleImage, ...] = ()
    """In order; `token_ids` has placeholders at their places."""

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
        """Whether no component can contribute a gradient.

        A weight of 0 silences a token for every component, an advantage of 0 for most policy losses.
        """
        return all(self._silent(component) for component in components if self.has(component))

    def _silent(self, component: Component) -> bool:
        speaks = self.loss_mask
        if self.weights is not None:
            speaks = speaks & (self.weights != 0)
        if component.silent_without_advantage and self.advantages is not None:
            speaks = speaks & (self.advantages != 0)
        return not speaks.any()


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model takes."""

    vocab_size: int
    max_sequence_tokens: int
    images: ImageSettings | None = None
    """None: it takes no images."""


def check_samples(
    samples: Sequence[Sample], limits: Limits, components: Sequence[Component] | None = None
) -> None:
    """ServiceError INVALID_SAMPLE (metadata has the index) or NO_TRAINABLE_TOKENS.

    With `components` (a ForwardBackward) the arrays that these need must be there, and every array that is
    there must be finite where the mask is 1.
    """
    names = {component.name for component in components or ()}
    images = ImageCheck(limits.images)
    for index, sample in enumerate(samples):
        _check_shape(index, sample, limits)
        if problem := images.problem(sample.images, sample.loss_mask):
            field, text = problem
            raise invalid(index, sample, text, field)
        if sample.support is not None:
            found = sample.support.problem(sample.token_ids, sample.loss_mask, limits.vocab_size)
            if found is not None:
                raise invalid(index, sample, found[1], found[0])
        if components is None:
            continue
        unknown = (sample.components or frozenset()) - names
        if unknown:
            text = f"component {min(unknown)!r} is not among the request's losses"
            raise invalid(index, sample, text, "components")
        _check_arrays(index, sample, [component for component in components if sample.has(component)])
    if not any(sample.loss_mask.any() for sample in samples):
        raise ServiceError(
            Reason.NO_TRAINABLE_TOKENS, "no sample has a token with loss_mask 1; there is nothing to train on"
        )


def invalid(index: int, sample: Sample | None, text: str, field: str = "") -> ServiceError:
    """The error for the sample at `index`, and its `field` if it is about one."""
    name = f" ({sample.sample_id})" if sample is not None and sample.sample_id else ""
    return ServiceError(
        Reason.INVALID_SAMPLE,
        f"sample {index}{name}: {text}",
        field=f"samples[{index}]" + (f".{field}" if field else ""),
        metadata={"index": index},
    )


def _check_shape(index: int, sample: Sample, limits: Limits) -> None:
    length = sample.length
    if length < 2:
        raise invalid(index, sample, f"has {length} tokens; at least 2 are needed", "chunks")
    if length > limits.max_sequence_tokens:
        text = f"has {length} tokens; this server takes at most {limits.max_sequence_tokens}"
        raise invalid(index, sample, text, "chunks")
    for name in ("loss_mask", *ARRAYS):
        array = getattr(sample, name)
        if array is not None and array.shape[0] != length:
            text = f"{name} has {array.shape[0]} entries for {length} tokens"
            raise invalid(index, sample, text, name)
    low, high = int(sample.token_ids.min()), int(sample.token_ids.max())
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        text = f"token id {bad} is outside the vocabulary of {limits.vocab_size}"
        raise invalid(index, sample, text, "chunks")
    if sample.loss_mask[0]:
        raise invalid(index, sample, "loss_mask[0] is 1: nothing precedes the first token", "loss_mask")
    if not (math.isfinite(sample.temperature) and sample.temperature > 0):
        text = f"sampling_temperature is {sample.temperature}; it must be a positive number"
        raise invalid(index, sample, text, "sampling_temperature")


def _check_arrays(index: int, sample: Sample, components: Sequence[Component]) -> None:
    if not sample.loss_mask.any():
        return
    for component in components:
        for name in component.needs:
            if getattr(sample, name) is None:
                text = f"{name} is missing; component {component.name!r} needs it"
                raise invalid(index, sample, text, name)
    for name in ARRAYS:
        array = getattr(sample, name)
        if array is None:
            continue
        wrong = np.flatnonzero(sample.loss_mask & ~np.isfinite(array))
        if wrong.size:
            at = int(wrong[0])
            raise invalid(index, sample, f"{name}[{at}] is {array[at]} where loss_mask is 1", name)
