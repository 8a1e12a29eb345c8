"""Helpers of engine tests: jobs, collecting, and a reference computed by transformers and peft."""

import functools
from collections.abc import Sequence
from pathlib import Path

from opentinker_inference.domain.sampling import (
    Completion,
    PromptScores,
    SampleDone,
    SampleJob,
    SamplingParams,
)
from opentinker_inference.ports import Engine

PROMPT = tuple(b"2 + 2 = ")


def job(
    request_id: str = "r1",
    prompt: Sequence[int] = PROMPT,
    n: int = 1,
    weights: str = "",
    end: tuple[int, ...] = (),
    **params: object,
) -> SampleJob:
    params.setdefault("max_tokens", 8)
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return SampleJob(request_id, weights, tuple(prompt), tuple(range(n)), sampling, end)


async def collect(engine: Engine, request: SampleJob) -> dict[int, Completion]:
    """Run a job to its end; completions by index."""
    completions: dict[int, Completion] = {}
    done = False
    async for event in engine.sample(request):
        assert not done
        if isinstance(event, Completion):
            assert event.index not in completions
            completions[event.index] = event
        done = isinstance(event, SampleDone)
    assert done
    assert sorted(completions) == sorted(request.indices)
    return completions


async def prompt_scores(engine: Engine, request: SampleJob) -> tuple[float, ...]:
    found = [event async for event in engine.sample(request) if isinstance(event, PromptScores)]
    assert len(found) == 1
    return found[0].logprobs


@functools.lru_cache(maxsize=24)
def _reference(model_dir: Path, adapter: Path | None):  # type: ignore[no-untyped-def]
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    return model.eval()


def reference_logits(model_dir: Path, adapter: Path | None, tokens: Sequence[int]):  # type: ignore[no-untyped-def]
    """Logits [tokens, vocabulary] of transformers (and peft), float32: what the trainer computes."""
    import torch

    with torch.no_grad():
        return _reference(model_dir, adapter)(torch.tensor([list(tokens)])).logits[0]


def reference_logprobs(
    model_dir: Path, adapter: Path | None, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Logprob of each of `ids` after `prompt` under the full distribution."""
    import torch

    logits = reference_logits(model_dir, adapter, [*prompt, *ids]) / temperature
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return [float(logprobs[i, token]) for i, token in enumerate(ids)]
