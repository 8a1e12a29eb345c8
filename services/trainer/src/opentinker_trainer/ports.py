"""What the trainer needs from the outside, as Protocols."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from opentinker_trainer.domain.tuning import ModelShape, TuningSpec
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.engine.v1 import trainer_engine_pb2


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The base model as it was loaded."""

    vocab_size: int
    context_tokens: int
    shape: ModelShape
    free_bytes: int = 0
    """Free memory of the device that it computes on; 0 where it is the host's."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Files that an engine wrote into a directory."""

    files: tuple[str, ...]
    engine_time: timedelta


@dataclass(frozen=True, slots=True)
class Restored:
    """State that an engine read from a directory."""

    step: int
    engine_time: timedelta


class Engine(Protocol):
    """One engine child. Runs one call at a time, in order; ENGINE_CRASHED means that it is gone for good."""

    @property
    def exited(self) -> asyncio.Future[int]:
        """Set when it is gone."""
        ...

    async def start(self) -> ModelInfo:
        """Start the child and load the base model."""
        ...

    async def create_policy(self, policy: str, spec: TuningSpec, seed: int) -> None:
        """Make a policy, or make it anew."""
        ...

    async def drop_policy(self, policy: str) -> None:
        """Forget a policy."""
        ...

    async def begin(self, request: trainer_engine_pb2.TrainBeginRequest) -> int:
        """Open a pass of a policy in place of any that is open, and run nothing; how many slices it takes."""
        ...

    async def advance(self, policy: str) -> trainer_engine_pb2.TrainAdvanceResponse:
        """Run the next slice of the policy's open pass; the answer is in the last one.

        A gradient is added with the last slice only. If it raises, nothing was added and no pass is open.
        """
        ...

    async def optim_step(
        self, request: trainer_engine_pb2.TrainOptimStepRequest
    ) -> trainer_engine_pb2.TrainOptimStepResponse:
        """Apply and clear the gradient. If it raises, nothing was changed."""
        ...

    async def save(self, policy: str, directory: Path, *, adapter_only: bool) -> Saved:
        """Write a policy's state, or its weights in PEFT layout."""
        ...

    async def restore(
        self, policy: str, directory: Path, *, weights_only: bool, drop_gradient: bool
    ) -> Restored:
        """Replace a policy's state. If it raises, nothing was changed."""
        ...

    async def close(self) -> None:
        """End the child."""
        ...


class Catalog(Protocol):
    """Where policies, versions and checkpoints are on record."""

    async def register_policy(
        self, request_id: str, policy: policy_pb2.Policy, version: policy_pb2.PolicyVersion, attempt: int
    ) -> None:
        """Record a policy and its version 0; the same again is fine."""
        ...

    async def register_version(self, version: policy_pb2.PolicyVersion, attempt: int, keep: int = 0) -> None:
        """Record a version, and let go of older ones than the newest `keep` (0: of none).

        The same again is fine. STALE_ATTEMPT, ALREADY_REGISTERED.
        """
        ...

    async def register_checkpoint(
        self, checkpoint: policy_pb2.Checkpoint, attempt: int, keep: int = 0
    ) -> None:
        """Record a checkpoint, and let go of older ones than the newest `keep` (0: of none).

        The same again is fine. STALE_ATTEMPT, ALREADY_REGISTERED.
        """
        ...
