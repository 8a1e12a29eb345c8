"""Train samples: flat rows of tokens with what a loss needs to know about each token.

Alignment: every per-token array has the length of the ids, entry i belongs to token i, entry 0 is never
trained on. Only the trainer shifts. What is malformed is refused here, by index, before anything is sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from opentinker.errors import InvalidSample, Reason
from opentinker.sampling.prompt import PlacedImage, chunks, images_of
from opentinker.sampling.support import MAX_SUPPORT, Support
from opentinkerapi.data.v1 import prompt_pb2, train_sample_pb2
from opentinkerapi.runtime.tensors import pack_floats, pack_ids

Array = Sequence[float] | NDArray[np.floating]

ARRAYS = {
    "logprobs": "behavior_logprobs",
    "advantages": "advantages",
    "weights": "weights",
    "proximal_logprobs": "proximal_logprobs",
    "reference_logprobs": "reference_logprobs",
    "teacher_logprobs": "teacher_logprobs",
    "returns": "returns",
    "old_values": "old_values",
}
"""Per-token arrays of a row, and their names on the wire."""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One row of n tokens. `loss_mask` [n] of 0 and 1; every other array [n] where a loss needs it."""

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Array | None = None
    """Of the sampler (behavior). For policy losses."""
    advantages: Array | None = None
    """For policy losses."""
    weights: Array | None = None
    """Factor of the token's loss in every component, of any sign. Default 1."""
    proximal_logprobs: Array | None = None
    """Of the trainer before the update: what the ratio of policy losses is taken to. Default `logprobs`."""
    reference_logprobs: Array | None = None
    """For KL."""
    teacher_logprobs: Array | None = None
    """For Distillation."""
    returns: Array | None = None
    """What the value head should say. For Value."""
    old_values: Array | None = None
    """What the value head said when the row was collected. For Value with a clip."""
    components: Sequence[str] = ()
    """Names of the loss components that the row takes part in. Default: all."""
    temperature: float = 1.0
    support: Support | None = None
    """What each token was chosen among: its logprob is one of the distribution over these ids alone. Default:
    all of the vocabulary.
    """
    spans: Sequence[tuple[int, int, int]] = ()
    """(start, end, version) of sampled runs."""
    group_id: str = ""
    sample_id: str = ""
    images: Sequence[PlacedImage] = ()
    """In order; `token_ids` has the model's placeholder at their places. Default: those of a Prompt."""

    def __post_init__(self) -> None:
        if not self.images:
            object.__setattr__(self, "images", images_of(self.token_ids))

    @property
    def loss_tokens(self) -> int:
        """How many tokens are trained on."""
        return int(sum(self.loss_mask))

    @property
    def inert(self) -> bool:
        """Whether a policy loss on it is 0 whatever the weights are: every advantage is 0."""
        if self.advantages is None:
            return False
        return not np.any(np.asarray(self.advantages)[np.asarray(self.loss_mask, dtype=bool)])

    def to_wire(self) -> train_sample_pb2.TrainSample:
        """As a message."""
        wire = train_sample_pb2.TrainSample(
            sample_id=self.sample_id,
            chunks=chunks(self.token_ids, self.images),
            loss_mask=bytes(self.loss_mask),
            sampling_temperature=self.temperature,
            version_spans=[
                prompt_pb2.VersionSpan(start=start, end=end, version=version)
                for start, end, version in self.spans
            ],
            group_id=self.group_id,
            components=self.components,
        )
        for name, field_name in ARRAYS.items():
            values = getattr(self, name)
            if values is not None:
                setattr(wire, field_name, pack_floats(values))
        if self.support is not None:
            wire.support_sizes = pack_ids(self.support.sizes)
            wire.support_token_ids = pack_ids(self.support.ids)
        return wire


class TrainSamples(Sequence[TrainSample]):
    """Rows of one batch, with what the making of them counted (`metrics`)."""

    def __init__(self, rows: Sequence[TrainSample], metrics: Mapping[str, float] | None = None) -> None:
        self._rows = tuple(rows)
        self.metrics: dict[str, float] = dict(metrics or {})

    @overload
    def __getitem__(self, index: int) -> TrainSample: ...
    @overload
    def __getitem__(self, index: slice) -> "TrainSamples": ...
    def __getitem__(self, index: int | slice) -> "TrainSample | TrainSamples":
        return (
            TrainSamples(self._rows[index], self.metrics) if isinstance(index, slice) else self._rows[index]
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[TrainSample]:
        return iter(self._rows)

    @property
    def loss_tokens(self) -> int:
        """Tokens that are trained on, over all rows: the denominator of a token mean, inert rows included."""
        return sum(row.loss_tokens for row in self._rows)

    @property
    def inert(self) -> bool:
        """Whether no row can move the policy."""
        return all(row.inert or row.loss_tokens == 0 for row in self._rows)


def check(samples: Sequence[TrainSample], needs: Mapping[str, Sequence[str]] | None = None) -> None:
    """InvalidSample, naming the index, if a row is malformed or lacks an array that a component it takes part
    in needs (`needs`: component -> arrays); InvalidArgument if nothing is trained on.
    """
    named = needs or {}
    for index, row in enumerate(samples):
        _check_row(index, row)
        if named and set(row.components) - set(named):
            raise _bad(
                index, f"components {sorted(set(row.components) - set(named))} are none of {sorted(named)}"
            )
        for component in row.components or named:
            for name in named[component] if named else ():
                if getattr(row, name) is None:
                    raise _bad(index, f"{name} is missing; {component!r} needs it")
    if not any(row.loss_tokens for row in samples):
        raise InvalidSample(
            "the batch has no token to train on", reason=Reason.NO_TRAINABLE_TOKENS, field="samples"
        )


def takes_part(row: TrainSample, component: str) -> bool:
    """Whether a component applies to a row."""
    return not row.components or component in row.components


def _check_row(index: int, row: TrainSample) -> None:
    count = len(row.token_ids)
    if count == 0:
        raise _bad(index, "it has no tokens")
    if len(row.loss_mask) != count:
        raise _bad(index, f"loss_mask has {len(row.loss_mask)} entries for {count} tokens")
    if set(row.loss_mask) - {0, 1}:
        raise _bad(index, "loss_mask must be 0 or 1")
    if row.loss_mask[0]:
        raise _bad(index, "loss_mask[0] is 1: the first token has nothing before it to be predicted from")
    trained = np.asarray(row.loss_mask, dtype=bool)
    at = 0
    for number, image in enumerate(row.images):
        if not at <= image.start < image.end <= count:
            raise _bad(index, f"image {number} takes places {image.start} to {image.end - 1} of {count}")
        if trained[image.start : image.end].any():
            raise _bad(index, f"loss_mask is 1 at a place of image {number}")
        at = image.end
    for name in ARRAYS:
        array = getattr(row, name)
        if array is None:
            continue
        values = np.asarray(array, dtype=np.float64)
        if values.shape != (count,):
            raise _bad(index, f"{name} has {_shape(values)} entries for {count} tokens")
        if not np.isfinite(values[trained]).all():
            raise _bad(index, f"{name} is not finite at a token that is trained on")
    if row.support is not None:
        _check_support(index, row.support, trained)


def _check_support(index: int, support: Support, trained: NDArray[np.bool_]) -> None:
    """What the trainer would not take; whether a token is in its own set is for it to say."""
    if len(support) != len(trained):
        raise _bad(index, f"support has {len(support)} entries for {len(trained)} tokens")
    if int(np.maximum(support.sizes, 0).sum()) != len(support.ids):
        raise _bad(index, f"support has {len(support.ids)} ids, and its sizes add up to another number")
    if (support.sizes[trained] < 0).any() or (support.sizes > MAX_SUPPORT).any():
        text = f"support: a token was chosen among more than {MAX_SUPPORT} ids; sample with a smaller top_k"
        raise _bad(index, text)


def _shape(values: NDArray[np.float64]) -> str:
    return str(len(values)) if values.ndim == 1 else "x".join(map(str, values.shape))


def _bad(index: int, problem: str) -> InvalidSample:
    return InvalidSample(
        f"sample {index}: {problem}",
        reason=Reason.INVALID_SAMPLE,
        field=f"samples[{index}]",
        metadata={"index": str(index)},
    )
