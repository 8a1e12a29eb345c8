"""An engine without a model, for tests and benchmarks of everything around engines. Never a default.

Tokens are a pure function of prompt, seed and position; logprobs are constant. Loading takes no time.
"""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from opentinker_inference.domain.sampling import (
    FIELDS,
    Completion,
    Delta,
    EngineInfo,
    PromptScores,
    SampleDone,
    SampleEvent,
    SampleJob,
    ScoreJob,
    StopReason,
)
from opentinker_inference.ports import EngineConfig, Weights
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

_SUPPORTED = ("max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos", "prompt_logprobs")
_FALLBACK_VOCABULARY = 1024
_LOGPROB = -1.0


class NoopEngine:
    """Answers at once with made-up tokens."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._merged = config.serving_mode == "merged"
        self._vocab_size = _vocab_size(config.model_dir)
        self._loaded: set[str] = {""}

    async def start(self) -> EngineInfo:
        return EngineInfo(
            engine="noop",
            dtype=self._config.dtype or "float32",
            serving_mode="merged" if self._merged else "adapter",
            max_resident_versions=1 if self._merged else self._config.max_resident_versions or 64,
            context_tokens=self._config.context_tokens,
            vocab_size=self._vocab_size,
            deterministic=True,
            sampling_fields=tuple(name for name in FIELDS if name in _SUPPORTED),
            pid=os.getpid(),
        )

    async def sample(self, job: SampleJob) -> AsyncIterator[SampleEvent]:
        self._check_loaded(job.weights)
        started = time.monotonic()
        await asyncio.sleep(0)
        if job.params.prompt_logprobs:
            yield PromptScores((float("nan"), *[_LOGPROB] * (len(job.prompt) - 1)))
        for index in job.indices:
            completion = self._completion(job, index)
            for at in range(len(completion.token_ids) - 1 if job.stream else 0):
                yield Delta(index, at, completion.token_ids[at : at + 1], (_LOGPROB,))
                await asyncio.sleep(0)
            yield completion
        yield SampleDone(time.monotonic() - started)

    async def score(self, job: ScoreJob) -> list[list[float]]:
        self._check_loaded(job.weights)
        return [[float("nan"), *[_LOGPROB] * (len(sequence) - 1)] for sequence in job.sequences]

    async def load(self, weights: Weights) -> float:
        if self._merged:
            self._loaded = {weights.key}
        self._loaded.add(weights.key)
        return 0.0

    async def unload(self, key: str) -> None:
        self._loaded.discard(key)
        self._loaded = self._loaded or {""}

    async def close(self) -> None:
        return

    def _check_loaded(self, key: str) -> None:
        if key not in self._loaded:
            raise ServiceError(Reason.VERSION_NOT_FOUND, f"weights {key or 'base'} are not loaded")

    def _completion(self, job: SampleJob, index: int) -> Completion:
        ids: list[int] = []
        reason = StopReason.LENGTH
        start = f"{job.weights}:{job.params.seed + index}:{job.prompt}"
        while len(ids) < job.params.max_tokens:
            digest = hashlib.blake2b(f"{start}:{len(ids)}".encode(), digest_size=4).digest()
            ids.append(int.from_bytes(digest, "little") % self._vocab_size)
            ended = job.reason_for(ids[-1])
            if ended is not None:
                reason = ended
                break
        return Completion(index, tuple(ids), (_LOGPROB,) * len(ids), reason)


def _vocab_size(model_dir: Path) -> int:
    config = model_dir / "config.json"
    if not config.exists():
        return _FALLBACK_VOCABULARY
    return int(json.loads(config.read_text()).get("vocab_size", _FALLBACK_VOCABULARY))
