"""What the front knows of a policy's training state; moves with each operation that ends well.

It is saved with every checkpoint, so that a replay starts from what was true there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason


@dataclass(frozen=True, slots=True)
class PolicyState:
    """Counters, and the ForwardBackwards whose gradient waits for an OptimStep."""

    version: int = 0
    """Latest published version."""
    step: int = 0
    """Optimizer steps taken."""
    open_seqs: tuple[int, ...] = ()

    def with_gradient(self, seq: int) -> "PolicyState":
        """A ForwardBackward added its gradient."""
        return replace(self, open_seqs=(*self.open_seqs, seq))

    def check_step(self, named: Sequence[int]) -> None:
        """ServiceError INCOMPLETE_BATCH unless a step names exactly the open ForwardBackwards."""
        missing = sorted(set(named) - set(self.open_seqs))
        extra = sorted(set(self.open_seqs) - set(named))
        if not missing and not extra:
            return
        parts = []
        if missing:
            parts.append(f"ForwardBackward {_list(missing)} failed or is missing")
        if extra:
            parts.append(f"the gradient of {_list(extra)} is there and not named")
        raise ServiceError(
            Reason.INCOMPLETE_BATCH,
            "; ".join(parts) + "; nothing was changed",
            field="forward_backward_seqs",
            metadata={"missing": _list(missing), "extra": _list(extra)},
        )

    def stepped(self, step: int) -> "PolicyState":
        """An OptimStep consumed the gradient."""
        return replace(self, step=step, open_seqs=())

    def published(self, version: int) -> "PolicyState":
        """A version was registered."""
        return replace(self, version=version)

    def restored(self, step: int, open_seqs: Sequence[int]) -> "PolicyState":
        """A checkpoint was loaded; version numbers go on, they are never used twice."""
        return replace(self, step=step, open_seqs=tuple(open_seqs))

    def to_json(self) -> dict[str, Any]:
        return {"version": self.version, "step": self.step, "open_seqs": list(self.open_seqs)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "PolicyState":
        return cls(int(value["version"]), int(value["step"]), tuple(int(seq) for seq in value["open_seqs"]))


def _list(seqs: Sequence[int]) -> str:
    return ", ".join(str(seq) for seq in seqs)
