"""vLLM as an engine: fast, with the same answers as far as float arithmetic allows.

What its defaults would get wrong is set here: logprobs are of the distribution sampled from
(`logprobs_mode`), stop tokens and seeds are explicit, nothing is taken from the model's generation_config,
and weights change only while generation is paused and with every cache cleared.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import structlog

from opentinker_inference.domain.sampling import (
    FIELDS,
    Completion,
    EngineInfo,
    PromptScores,
    SampleDone,
    SampleEvent,
    SampleJob,
    ScoreJob,
)
from opentinker_inference.engine.merge import PristineBase
from opentinker_inference.engine.vllm_outputs import (
    MAX_LOGPROBS,
    Outputs,
    bad_schema,
    prompt_scores,
    sampling_params,
)
from opentinker_inference.engine.vllm_spans import label_of, may_run
from opentinker_inference.ports import EngineConfig, Weights
from opentinker_kit.errors import ServiceError
from opentinker_kit.models import image_settings
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

_WORKER = "opentinker_inference.engine.vllm_worker.MergingWorker"
_CPU_BLOCK = 32
"""Smallest block on CPU; prompts share a cached prefix only in whole blocks."""
_CPU_BATCH_TOKENS = 8192
"""Prompt tokens that one step may take in; at least the context, for no prompt is split."""
_CPU_CACHE_BYTES = 1 << 30
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_DEFAULT_ROWS = 256
_DEFAULT_VERSIONS = 8
_LIVE_IN_A_BATCH = 4
_UNSUPPORTED = {"raw_logprobs"}
_ERROR_CHARACTERS = 500


class VllmEngine:
    """Engine over AsyncLLM. Each completion is a request of its own with its own seed."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._llm: Any = None
        self._merged = False
        self._resident = ""
        self._loras: dict[str, Any] = {}
        self._next_lora = 1
        self._versions = config.max_resident_versions or _DEFAULT_VERSIONS

    async def start(self) -> EngineInfo:
        if image_settings(self._config.model_dir) is not None:
            # Seen with 0.32: the module of such a model imports torchvision, and PyPI's does not load beside
            # a CPU build of torch; on GPUs nobody has tried images through this engine.
            text = "the vllm engine serves no vision-language models; use engine=transformers"
            raise ServiceError(Reason.UNSUPPORTED_COMBINATION, text, field="engine")
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        started = time.monotonic()
        on_cpu = bool(current_platform.is_cpu())
        dtype = self._config.dtype or "bfloat16"
        # On CPU the adapter kernels take 3.5 to 7 times as long as the base path; merged costs nothing.
        mode = self._config.serving_mode or ("merged" if on_cpu else "adapter")
        self._merged = mode == "merged"
        self._llm = AsyncLLM.from_engine_args(self._engine_args(on_cpu, dtype))
        model_config = self._llm.model_config
        await self._llm.update_weight_version(label_of(""))
        await self._warm_up()
        log.info("engine started", dtype=dtype, mode=mode, start_s=round(time.monotonic() - started, 2))
        return EngineInfo(
            engine="vllm",
            dtype=dtype,
            serving_mode=mode,
            max_resident_versions=1 if self._merged else self._versions,
            context_tokens=int(model_config.max_model_len),
            vocab_size=int(model_config.get_vocab_size()),
            deterministic=False,
            sampling_fields=tuple(name for name in FIELDS if name not in _UNSUPPORTED),
            score_temperature=False,
            pid=os.getpid(),
            continues=self._merged,
        )

    async def sample(self, job: SampleJob) -> AsyncIterator[SampleEvent]:
        lora = None if self._merged and may_run(job, self._resident) else self._lora_for(job.weights)
        started = time.monotonic()
        events: asyncio.Queue[SampleEvent | Exception] = asyncio.Queue()
        cached = 0

        async def run(index: int) -> None:
            nonlocal cached
            outputs = Outputs(job, index)
            try:
                async for output in self._generate(
                    f"{job.request_id}/{index}", job.prompt, sampling_params(job, index), lora
                ):
                    if output.prompt_logprobs is not None and not told.is_set():
                        told.set()
                        events.put_nowait(PromptScores(prompt_scores(job.prompt, output)))
                    delta = outputs.take(output.outputs[0])
                    if output.finished:
                        cached = max(cached, output.num_cached_tokens or 0)
                        events.put_nowait(outputs.completion(output.outputs[0], merged=self._merged))
                    elif delta.token_ids:
                        events.put_nowait(delta)
            except Exception as error:
                events.put_nowait(error)

        told = asyncio.Event()
        tasks = [asyncio.create_task(run(index)) for index in job.indices]
        left = len(tasks)
        try:
            while left:
                event = await events.get()
                if isinstance(event, Exception):
                    raise _translated(event, job)
                left -= isinstance(event, Completion)
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        yield SampleDone(time.monotonic() - started, cached)

    async def score(self, job: ScoreJob) -> list[list[float]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        lora = self._lora_for(job.weights)
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        async def one(place: int, tokens: tuple[int, ...]) -> list[float]:
            request_id = f"{job.request_id}/score/{place}"
            outputs = [output async for output in self._generate(request_id, tokens, params, lora)]
            return list(prompt_scores(tokens, outputs[-1]))

        longest = max(map(len, job.sequences))
        if longest >= self._config.context_tokens:
            raise ServiceError(
                Reason.PROMPT_TOO_LONG,
                f"a sequence of {longest} tokens leaves no room for the one token that vLLM samples when it "
                f"scores; the context holds {self._config.context_tokens}",
                metadata={"prompt_tokens": longest, "context_tokens": self._config.context_tokens},
            )
        try:
            return await asyncio.gather(*(one(i, tokens) for i, tokens in enumerate(job.sequences)))
        except Exception as error:
            raise _translated(error) from error

    async def load(self, weights: Weights) -> float:
        started = time.monotonic()
        if self._merged:
            await self._swap(weights)
        elif weights.directory is not None and weights.key not in self._loras:
            await self._add(weights)
        return time.monotonic() - started

    async def unload(self, key: str) -> None:
        if self._merged:
            if key and key == self._resident:
                await self._swap(Weights("", None))
            return
        lora = self._loras.pop(key, None)
        if lora is not None:
            await self._llm.remove_lora(lora.lora_int_id)

    async def close(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()

    # Starting

    def _engine_args(self, on_cpu: bool, dtype: str) -> Any:
        from vllm.config import StructuredOutputsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs

        options: dict[str, Any] = {
            "model": str(self._config.model_dir),
            "tokenizer": str(self._config.model_dir),
            "dtype": dtype,
            "max_model_len": self._config.context_tokens,
            "max_num_seqs": self._config.max_rows or _DEFAULT_ROWS,
            "max_logprobs": MAX_LOGPROBS,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            # Named, not "auto": that takes the library which the first schema suits for all that follow. And
            # without free whitespace, with which a model could go on for ever.
            "structured_outputs_config": StructuredOutputsConfig(
                backend="guidance", disable_any_whitespace=True
            ),
            # On a GPU captured graphs go on after a swap: reloading copies into the tensors they refer to.
            "enforce_eager": on_cpu,
            "disable_log_stats": True,
            "worker_extension_cls": _WORKER,
        }
        if on_cpu:
            options |= {
                "block_size": _CPU_BLOCK,
                "distributed_executor_backend": "uni",
                "kv_cache_memory_bytes": self._config.kv_cache_bytes or _CPU_CACHE_BYTES,
                # After a partial prefill vLLM rewinds the request's generator; CPU generators cannot be.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(self._config.context_tokens, _CPU_BATCH_TOKENS),
            }
        elif self._config.kv_cache_bytes:
            options["kv_cache_memory_bytes"] = self._config.kv_cache_bytes
        if not self._merged:
            options |= {
                "enable_lora": True,
                # Without a list vLLM wraps the output layer too, which no adapter of ours changes: slow on
                # CPU, and prompt logprobs of two requests at once kill it.
                "lora_target_modules": _linear_leaves(self._config.model_dir),
                "max_lora_rank": next(r for r in _LORA_RANKS if r >= self._config.max_lora_rank),
                "max_loras": min(self._versions, _LIVE_IN_A_BATCH),
                "max_cpu_loras": self._versions,
            }
        return AsyncEngineArgs(**options)

    async def _warm_up(self) -> None:
        """The first request pays for lazy set-up; a user's should not."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=2, seed=0, logprobs=0, detokenize=False, ignore_eos=True)

        async def row(number: int) -> None:
            async for _ in self._generate(f"warm-up/{number}", (1, 1, 1), params, None):
                pass

        await asyncio.gather(*map(row, range(4)))
        await self._llm.reset_prefix_cache()

    # Sampling

    def _generate(
        self, request_id: str, tokens: tuple[int, ...], params: Any, lora: Any
    ) -> AsyncIterator[Any]:
        prompt = {"prompt_token_ids": list(tokens)}
        outputs: AsyncIterator[Any] = self._llm.generate(prompt, params, request_id, lora_request=lora)
        return outputs

    def _lora_for(self, key: str) -> Any:
        if self._merged:
            if key != self._resident:
                raise ServiceError(Reason.VERSION_NOT_FOUND, f"weights {key or 'base'} are not loaded")
            return None
        if not key:
            return None
        if key not in self._loras:
            raise ServiceError(Reason.VERSION_NOT_FOUND, f"weights {key} are not loaded")
        return self._loras[key]

    # Weights

    async def _add(self, weights: Weights) -> None:
        from vllm.lora.request import LoRARequest

        # Neither name nor number is ever used again: cached prefixes are keyed by the name.
        number, self._next_lora = self._next_lora, self._next_lora + 1
        name = f"{weights.key}#{number}"
        request = LoRARequest(name, number, str(weights.directory))
        try:
            added = await self._llm.add_lora(request)
        except Exception as error:
            raise _translated(error) from error
        if not added:
            raise ServiceError(Reason.INVALID_WEIGHTS, "vLLM did not take the adapter")
        self._loras[weights.key] = request

    async def _swap(self, weights: Weights) -> None:
        """The safe swap. Opening the files comes first: a failure there changes nothing."""
        if weights.key == self._resident:
            return
        directory = str(weights.directory) if weights.directory is not None else ""
        stage = "opentinker_stage_model" if weights.full else "opentinker_stage_adapter"
        try:
            await self._llm.collective_rpc(stage, args=(directory,))
        except Exception as error:
            if self._llm.errored:
                raise _translated(error) from error
            log.exception("weights cannot be read", directory=directory)
            raise ServiceError(Reason.INVALID_WEIGHTS, "the version's files cannot be read") from error
        try:
            await self._llm.pause_generation(mode="keep", clear_cache=True)
            await self._llm.collective_rpc("opentinker_swap", args=(str(self._config.model_dir),))
            await self._llm.update_weight_version(label_of(weights.key))
            await self._llm.resume_generation()
        except Exception as error:
            # The weights may be half replaced: this engine must not answer again.
            log.exception("a weight swap failed")
            raise ServiceError(Reason.ENGINE_CRASHED) from error
        self._resident = weights.key


def _linear_leaves(model_dir: Path) -> list[str]:
    """Last parts of the names of the layers inside blocks that an adapter can change."""
    names = [name.split(".") for name in PristineBase(model_dir).names()]
    inside = [parts for parts in names if parts[-1] == "weight" and any(part.isdigit() for part in parts)]
    return sorted({parts[-2] for parts in inside if "norm" not in parts[-2]})


def _translated(error: Exception, job: SampleJob | None = None) -> Exception:
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, EngineDeadError) or isinstance(error.__cause__, EngineDeadError):
        return ServiceError(Reason.ENGINE_CRASHED)
    # Everything else that a caller could get wrong is checked before a job comes here.
    if isinstance(error, VLLMClientError) and job is not None and job.params.json_schema:
        return bad_schema(str(error)[:_ERROR_CHARACTERS])
    return error
