"""Rules without engines: adapter layout, parameters, the book of requests, text, names."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_inference.domain import requests
from opentinker_inference.domain.adapter_layout import check_adapter, linear_layers
from opentinker_inference.domain.requests import RequestBook, SampleSpec
from opentinker_inference.domain.sampling import (
    Completion,
    SampleDone,
    SamplingParams,
    StopReason,
    cut_at_stop,
    fit_to_context,
)
from opentinker_inference.domain.versions import BASE, check_policy_name
from opentinker_inference.engine.kv import capacity_for, padded_length
from opentinker_kit.clock import ManualClock
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

LAYERS = {"model.layers.0.self_attn.q_proj": (8, 4), "model.layers.0.mlp.up_proj": (16, 4)}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 32}


def tensors(rank: int = 2, prefix: str = "base_model.model.") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for module, (out_size, in_size) in LAYERS.items():
        shapes[f"{prefix}{module}.lora_A.weight"] = (rank, in_size)
        shapes[f"{prefix}{module}.lora_B.weight"] = (out_size, rank)
    return shapes


def test_a_valid_adapter() -> None:
    facts = check_adapter(CONFIG, tensors(), LAYERS, 8)
    assert (facts.rank, facts.scale) == (2, 16.0)
    assert set(facts.modules) == set(LAYERS)
    rs = check_adapter(CONFIG | {"use_rslora": True, "r": 4}, tensors(4), LAYERS, 8)
    assert rs.scale == 16.0


@pytest.mark.parametrize(
    ("config", "shapes", "text"),
    [
        # B86: keys without or with another prefix, a rank or alpha that is missing or does not fit.
        (CONFIG, tensors(prefix=""), "belong to no linear layer"),
        (CONFIG, tensors(prefix="base_model.model.model."), "belong to no linear layer"),
        (CONFIG, {}, "no tensors"),
        ({"peft_type": "LORA", "lora_alpha": 32}, tensors(), "no valid rank"),
        ({"peft_type": "LORA", "r": 2}, tensors(), "no valid lora_alpha"),
        (CONFIG | {"r": 4}, tensors(), "rank 4"),
        (CONFIG | {"r": 16}, tensors(16), "max_lora_rank of 8"),
        (CONFIG | {"bias": "all"}, tensors(), "bias"),
        (CONFIG | {"rank_pattern": {"q_proj": 1}}, tensors(), "rank_pattern"),
        (CONFIG | {"modules_to_save": ["lm_head"]}, tensors(), "modules_to_save"),
        (CONFIG | {"peft_type": "IA3"}, tensors(), "peft_type"),
        (CONFIG | {"target_modules": ["k_proj"]}, tensors(), "none of the target_modules"),
        (CONFIG, dict(list(tensors().items())[:3]), "only one of"),
    ],
)
def test_an_adapter_that_would_not_do_what_it_says(
    config: dict[str, object], shapes: dict[str, tuple[int, ...]], text: str
) -> None:
    with pytest.raises(ServiceError, match=text) as caught:
        check_adapter(config, shapes, LAYERS, 8)
    assert caught.value.reason is Reason.INVALID_WEIGHTS


def test_linear_layers_of_a_checkpoint() -> None:
    shapes = {
        "model.embed_tokens.weight": (100, 4),
        "model.norm.weight": (4,),
        "model.layers.0.mlp.up_proj.weight": (16, 4),
        "model.layers.0.mlp.up_proj.bias": (16,),
    }
    assert linear_layers(shapes) == {"model.layers.0.mlp.up_proj": (16, 4)}


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 300))
def test_what_is_sampled_fits_the_context(prompt: int, context: int, asked: int) -> None:
    params = SamplingParams(max_tokens=asked)
    if prompt >= context:
        with pytest.raises(ServiceError) as caught:
            fit_to_context(params, prompt, context)
        assert caught.value.reason is Reason.PROMPT_TOO_LONG
    else:
        fitted = fit_to_context(params, prompt, context).max_tokens
        assert 1 <= fitted <= asked
        assert prompt + fitted <= context


@given(st.integers(1, 5000))
def test_capacities(positions: int) -> None:
    capacity = capacity_for(positions)
    assert positions <= capacity <= max(64, 2 * positions)
    assert capacity_for(capacity) == capacity
    if positions <= 512:
        assert positions <= padded_length(positions) <= max(16, 2 * positions)


def test_text_is_cut_at_the_stop_string() -> None:
    assert cut_at_stop("one END two", "END", False) == "one "
    assert cut_at_stop("one END two", "END", True) == "one END"
    assert cut_at_stop("one", "", False) == "one"


@pytest.mark.parametrize("name", ["policies/a", "policies/a-b_9", f"policies/{'a' * 64}"])
def test_policy_names(name: str) -> None:
    check_policy_name(name, "policy")


@pytest.mark.parametrize(
    "name", ["", "a", "policies/", "policies/..", "policies/a/b", "policies/A", "policies/a\n", "/policies/a"]
)
def test_names_that_are_no_policy(name: str) -> None:
    with pytest.raises(ServiceError):
        check_policy_name(name, "policy")


# The book of requests


def spec(request_id: str, digest: str = "d", n: int = 1) -> SampleSpec:
    return SampleSpec(request_id, digest, BASE, (1,), SamplingParams(), True, True, n)


def completion(index: int, tokens: int = 1) -> Completion:
    return Completion(index, (1,) * tokens, (-1.0,) * tokens, StopReason.LENGTH)


async def test_finished_requests_are_kept_for_ten_minutes() -> None:
    clock = ManualClock()
    book = RequestBook(clock)
    call = book.open(spec("a"), SamplingParams())
    call.add(completion(0))
    call.finish(clock.monotonic())
    book.open(spec("running"), SamplingParams())
    await clock.advance(599)
    assert book.find(spec("a")) is call
    with pytest.raises(ServiceError) as caught:
        book.find(spec("a", "other"))
    assert caught.value.reason is Reason.REQUEST_ID_REUSED
    await clock.advance(2)
    assert book.find(spec("a")) is None
    assert book.find(spec("running")) is not None


async def test_the_oldest_go_when_too_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_KEPT_TOKENS", 100)
    clock = ManualClock()
    book = RequestBook(clock)
    for index in range(4):
        call = book.open(spec(str(index)), SamplingParams())
        call.add(completion(0, 40))
        call.finish(clock.monotonic())
        await clock.advance(1)
    await clock.advance(2)
    kept = [index for index in range(4) if book.find(spec(str(index))) is not None]
    assert kept == [2, 3]


async def test_followers_see_everything_once_whenever_they_join() -> None:
    clock = ManualClock()
    book = RequestBook(clock)
    call = book.open(spec("a", n=2), SamplingParams())

    async def follow() -> list[object]:
        return [event async for event in call.follow(10)]

    early = asyncio.create_task(follow())
    await asyncio.sleep(0)
    call.add(completion(1))
    middle = asyncio.create_task(follow())
    await asyncio.sleep(0)
    assert call.missing == (0,)
    call.add(completion(0))
    call.add(completion(0, 5))  # a second try may not replace what was given out
    call.add(SampleDone(0.5))
    call.finish(clock.monotonic())
    for events in (await early, await middle, await follow()):
        assert [e.index for e in events if isinstance(e, Completion)] == [1, 0]
        assert events[-1] == SampleDone(0.5)
        assert [len(e.token_ids) for e in events if isinstance(e, Completion)] == [1, 1]
