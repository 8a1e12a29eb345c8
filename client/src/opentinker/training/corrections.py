"""Off-policy corrections: what becomes of w = exp(proximal logprob - behavior logprob), a factor of the loss.

The sampler and the trainer never agree to the last bit, and a batch may come from an older version. A policy
loss takes its ratio to the proximal logprobs (the trainer's own, from before the update) and multiplies each
token by the bounded, detached w. Samples must carry `proximal_logprobs` (`Policy.forward` gives them).
"""

from dataclasses import dataclass
from typing import ClassVar

from opentinker.training.limits import above, ordered
from opentinkerapi.data.v1 import loss_pb2


@dataclass(frozen=True, slots=True)
class TIS:
    """Truncated importance sampling: min(w, high) for each token."""

    high: float = 2.0

    kind: ClassVar["loss_pb2.CorrectionKind.ValueType"] = loss_pb2.CORRECTION_KIND_TOKEN_TRUNCATE

    def __post_init__(self) -> None:
        above("high", self.high, 0.0)


@dataclass(frozen=True, slots=True)
class IcePop:
    """w for each token where it lies in [low, high], 0 elsewhere."""

    low: float = 0.5
    high: float = 5.0

    kind: ClassVar["loss_pb2.CorrectionKind.ValueType"] = loss_pb2.CORRECTION_KIND_TOKEN_MASK

    def __post_init__(self) -> None:
        ordered("low", self.low, "high", self.high)


@dataclass(frozen=True, slots=True)
class SequenceTruncate:
    """min(product of w over the sequence, high) for all its tokens."""

    high: float = 2.0

    kind: ClassVar["loss_pb2.CorrectionKind.ValueType"] = loss_pb2.CORRECTION_KIND_SEQUENCE_TRUNCATE

    def __post_init__(self) -> None:
        above("high", self.high, 0.0)


@dataclass(frozen=True, slots=True)
class SequenceMask:
    """The product of w over the sequence where it lies in [low, high], 0 elsewhere."""

    low: float = 0.0
    high: float = 3.0

    kind: ClassVar["loss_pb2.CorrectionKind.ValueType"] = loss_pb2.CORRECTION_KIND_SEQUENCE_MASK

    def __post_init__(self) -> None:
        ordered("low", self.low, "high", self.high)


@dataclass(frozen=True, slots=True)
class GeometricMask:
    """The token's w where the geometric mean over its sequence lies in [low, high], 0 for other sequences.

    `token_high` bounds w inside the sequences that are kept: one token of thousands may be far off and hide
    in the mean.
    """

    low: float = 0.99
    high: float = 1.01
    token_high: float = 2.0

    kind: ClassVar["loss_pb2.CorrectionKind.ValueType"] = loss_pb2.CORRECTION_KIND_GEOMETRIC_MASK

    def __post_init__(self) -> None:
        ordered("low", self.low, "high", self.high)
        above("token_high", self.token_high, 0.0)


@dataclass(frozen=True, slots=True)
class Decoupled:
    """w itself, unbounded: decoupled PPO, whose clip is around the proximal policy."""

    kind: ClassVar["loss_pb2.CorrectionKind.ValueType"] = loss_pb2.CORRECTION_KIND_NONE


Correction = TIS | IcePop | SequenceTruncate | SequenceMask | GeometricMask | Decoupled


def to_wire(correction: Correction) -> loss_pb2.OffPolicyCorrection:
    """As a message."""
    wire = loss_pb2.OffPolicyCorrection(kind=correction.kind)
    for name in ("low", "high", "token_high"):
        value = getattr(correction, name, None)
        if value is not None:
            setattr(wire, name, value)
    return wire
