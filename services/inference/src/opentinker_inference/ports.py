"""What the service needs from the outside, as Protocols."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from opentinker_inference.domain.sampling import EngineInfo, SampleEvent, SampleJob, ScoreJob
from opentinker_inference.domain.versions import LocalWeights, ModelRef


@dataclass(frozen=True, slots=True)
class Weights:
    """Validated weights in a local directory, under the key that jobs name them by.

    `directory` holds a LoRA adapter in PEFT layout, or (`full`) the whole model in Hugging Face layout with
    the base model's tensors; None means the base model itself.
    """

    key: str
    directory: Path | None
    rank: int = 0
    full: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to start an engine. Zero and "" mean the engine's default.

    `serving_mode` is "adapter" or "merged"; `context_tokens` counts prompt and completion together;
    `kv_cache_bytes` and `max_rows` (sequences decoded at once) bound memory.
    """

    engine: str
    model_dir: Path
    context_tokens: int
    dtype: str = ""
    serving_mode: str = ""
    max_resident_versions: int = 0
    max_lora_rank: int = 32
    threads: int = 0
    kv_cache_bytes: int = 0
    max_rows: int = 0


class Engine(Protocol):
    """One base model that samples and scores, alone or with loaded weights.

    The adapters live in engine children; the front holds a client that speaks for its child. Every method
    may raise ServiceError; ENGINE_CRASHED means that the engine is gone and everything in it.
    """

    async def start(self) -> EngineInfo:
        """Load the base model. Called once, before anything else."""
        ...

    def sample(self, job: SampleJob) -> AsyncIterator[SampleEvent]:
        """Completions in the order they finish, PromptScores where asked for, SampleDone last.

        Closing the iterator cancels the job.
        """
        ...

    async def score(self, job: ScoreJob) -> list[list[float]]:
        """One list a sequence with one logprob a token; the first entry is NaN."""
        ...

    async def load(self, weights: Weights) -> float:
        """Make `weights.key` usable; returns seconds spent. Loading a loaded key costs nothing.

        A merged engine holds one key, which this replaces: only jobs that may continue may run meanwhile.
        Their caches are cleared, and what they sample from then on is of the new weights.
        """
        ...

    async def unload(self, key: str) -> None:
        """Free a key; unknown keys are ignored. No job may be using it."""
        ...

    async def close(self) -> None:
        """End the engine."""
        ...


class EngineHost(Engine, Protocol):
    """An engine that is started again when it dies. Calls fail with ENGINE_CRASHED while none runs."""

    def info(self) -> EngineInfo:
        """What the engine offers; SERVER_STARTING before the first start ended, or why it failed."""
        ...

    async def wait_started(self) -> EngineInfo:
        """The engine's offer once it runs; ServiceError if it cannot be started."""
        ...

    def on_started(self, callback: Callable[[EngineInfo], None]) -> None:
        """Have `callback` called after every start, before any call reaches the new engine."""
        ...


class VersionStore(Protocol):
    """Where versions' files come from."""

    async def fetch(self, ref: ModelRef) -> LocalWeights | None:
        """The version's weights in a local directory, verified against its manifest and validated
        against the base model; None where the version is the base model.

        VERSION_NOT_FOUND, DIGEST_MISMATCH, INVALID_WEIGHTS or STORAGE_UNAVAILABLE. Fetching again is cheap.
        """
        ...

    def hold(self, ref: ModelRef) -> AbstractAsyncContextManager[LocalWeights | None]:
        """The same; while the block runs the directory stays, whatever is fetched meanwhile."""
        ...

    def knows(self, policy: str) -> bool:
        """Whether a version of `policy` was fetched before."""
        ...
