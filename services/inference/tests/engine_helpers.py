"""Helpers of engine tests: jobs, collecting, and a reference computed by transformers and peft."""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

from opentinker_inference.domain.sampling import (
    Completion,
    Delta,
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
    stream: bool = False,
    **params: object,
) -> SampleJob:
    params.setdefault("max_tokens", 8)
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return SampleJob(request_id, weights, tuple(prompt), tuple(range(n)), sampling, end, stream=stream)


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


async def read_along(engine: Engine, request: SampleJob) -> dict[int, tuple[Completion, list[Delta]]]:
    """Run a job that streams; what each completion said before it finished, and the whole. Each delta begins
    where the one before it ended, and says what the completion then has there.
    """
    assert request.stream
    deltas: dict[int, list[Delta]] = {index: [] for index in request.indices}
    completions: dict[int, Completion] = {}
    async for event in engine.sample(request):
        if isinstance(event, Delta):
            assert event.index not in completions
            assert event.start == sum(len(delta.token_ids) for delta in deltas[event.index])
            deltas[event.index].append(event)
        elif isinstance(event, Completion):
            completions[event.index] = event
    for index, whole in completions.items():
        for delta in deltas[index]:
            place = slice(delta.start, delta.start + len(delta.token_ids))
            assert delta.token_ids == whole.token_ids[place]
            assert delta.logprobs == pytest.approx(whole.logprobs[place])
            assert delta.top_ids == whole.top_ids[place]
            assert len(delta.top_logprobs) == len(delta.top_ids)
    return {index: (whole, deltas[index]) for index, whole in completions.items()}


async def prompt_scores(engine: Engine, request: SampleJob) -> tuple[float, ...]:
    found = [event async for event in engine.sample(request) if isinstance(event, PromptScores)]
    assert len(found) == 1
    return found[0].logprobs


@functools.lru_cache(maxsize=8)
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
