"""Requests that are read along, given up and forgotten; parameters that make no sense."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_inference.domain import progress
from opentinker_inference.domain.progress import Progress
from opentinker_inference.domain.requests import KEEP_S, RequestBook, SampleCall, SampleSpec
from opentinker_inference.domain.sampling import (
    FIELDS,
    Completion,
    Delta,
    PromptScores,
    SampleDone,
    SampleEvent,
    SamplingParams,
    StopReason,
    check_params,
    check_supported,
    support_table,
)
from opentinker_inference.domain.versions import BASE
from opentinker_inference.engine.noop_engine import NoopEngine
from opentinker_inference.ports import EngineConfig
from opentinker_kit.clock import ManualClock
from opentinker_kit.errors import ServiceError
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.runtime.reasons import Reason


def spec(n: int = 1, **params: object) -> SampleSpec:
    return SampleSpec("r", "d", BASE, (1,), SamplingParams(**params), True, True, n)  # type: ignore[arg-type]


def call(n: int = 1, **params: object) -> SampleCall:
    asked = spec(n, **params)
    return SampleCall(asked, asked.params)


def delta(index: int, start: int, *ids: int) -> Delta:
    return Delta(index, start, ids, tuple(-0.5 * token for token in ids))


def whole(index: int, *ids: int) -> Completion:
    return Completion(index, ids, tuple(-0.5 * token for token in ids), StopReason.LENGTH)


async def read(events: AsyncIterator[SampleEvent | None]) -> list[SampleEvent | None]:
    return [event async for event in events]


# Reading along


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_readers_get_every_token_once_in_order_whenever_they_read(data: st.DataObject) -> None:
    """Any interleaving of what the engine says and what two readers take."""

    async def play() -> None:
        length = data.draw(st.integers(1, 12))
        ids = tuple(range(1, length + 1))
        running = call()
        readers = [running.follow(10, deltas=True) for _ in range(2)]
        got: list[list[SampleEvent | None]] = [[], []]
        said = 0
        while said < length - 1:
            if data.draw(st.booleans()):
                count = data.draw(st.integers(1, length - 1 - said))
                running.add(delta(0, said, *ids[said : said + count]))
                said += count
            reader = data.draw(st.integers(0, 1))
            known = sum(len(e.token_ids) for e in got[reader] if isinstance(e, Delta))
            if known < said:
                got[reader].append(await anext(readers[reader]))
        running.add(whole(0, *ids))
        running.add(SampleDone(0.5))
        running.finish(1.0)
        for events, reader in zip(got, readers, strict=True):
            events += await read(reader)
            deltas = [event for event in events if isinstance(event, Delta)]
            assert [d.start for d in deltas] == [
                sum(len(x.token_ids) for x in deltas[:i]) for i in range(len(deltas))
            ]
            assert sum((d.token_ids for d in deltas), ()) == ids
            assert sum((d.logprobs for d in deltas), ()) == whole(0, *ids).logprobs
            assert events[len(deltas) :] == [whole(0, *ids), SampleDone(0.5)]

    asyncio.run(play())


async def test_a_long_completion_comes_in_pieces_that_a_message_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "MAX_DELTA_ENTRIES", 12)
    running = call()
    tops = tuple((1, 2, 3) for _ in range(10))
    values = tuple((-1.0, -2.0, -3.0) for _ in range(10))
    running.add(Completion(0, tuple(range(10)), (-1.0,) * 10, StopReason.LENGTH, "", tops, values))
    running.finish(1.0)
    events = await read(running.follow(10, deltas=True))
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [len(d.token_ids) for d in deltas] == [len(d.top_ids) for d in deltas] == [3, 3, 3, 1]


async def test_scores_of_the_prompt_come_before_what_follows_it() -> None:
    running = call(prompt_logprobs=True)
    running.add(delta(0, 0, 1))
    reader = running.follow(0.01, deltas=True)
    assert await anext(reader) is None
    running.add(PromptScores((-1.0,)))
    assert isinstance(await anext(reader), PromptScores)
    assert isinstance(await anext(reader), Delta)


async def test_a_second_try_goes_on_where_readers_are() -> None:
    running = call()
    running.add(delta(0, 0, 1, 2))
    reader = running.follow(10, deltas=True)
    assert (await anext(reader)) == delta(0, 0, 1, 2)
    # The engine died; the new one samples the same.
    running.add(delta(0, 0, 1))
    running.add(delta(0, 1, 2, 3))
    running.add(whole(0, 1, 2, 3, 4))
    running.finish(1.0)
    got = await read(reader)
    assert got[:2] == [delta(0, 2, 3, 4), whole(0, 1, 2, 3, 4)]


@pytest.mark.parametrize("told", ["by a delta", "by the completion", "by one that is shorter"])
async def test_a_second_try_that_samples_other_tokens_is_no_stream_to_go_on_with(told: str) -> None:
    running = call()
    running.add(delta(0, 0, 1, 2))
    reader = running.follow(10, deltas=True)
    await anext(reader)
    if told == "by a delta":
        running.add(delta(0, 0, 1, 7))
        running.add(delta(0, 2, 8))
    running.add(whole(0, 1) if told == "by one that is shorter" else whole(0, 1, 7, 8))
    running.finish(1.0)
    with pytest.raises(ServiceError) as caught:
        await anext(reader)
    assert caught.value.reason is Reason.ENGINE_CRASHED
    # Who begins anew gets what is true now.
    deltas = [event for event in await read(running.follow(10, deltas=True)) if isinstance(event, Delta)]
    assert sum((d.token_ids for d in deltas), ()) == running.completions[0].token_ids


def test_progress_keeps_one_copy() -> None:
    known = Progress()
    for place in range(100):
        known.add(delta(0, place, place))
    known.finish(whole(0, *range(100)))
    assert known.token_ids == known.logprobs == []
    part = known.part(0, 98)
    assert part is not None
    assert part.token_ids == (98, 99)


# Giving up, forgetting


async def waiting(running: SampleCall) -> None:
    async with running.limited():
        await asyncio.sleep(3600)


async def test_a_request_ends_when_nobody_waits_any_more() -> None:
    running = call()
    running.wait_for(0.01)
    with pytest.raises(ServiceError) as caught:
        await waiting(running)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("other_s", [None, 3600.0])
async def test_who_waits_longer_decides(begun: bool, other_s: float | None) -> None:
    running = call()
    running.wait_for(0.05)
    task = asyncio.create_task(waiting(running))
    if begun:
        await asyncio.sleep(0)
    running.wait_for(other_s)
    running.wait_for(0.01)  # who waits less changes nothing
    done, _ = await asyncio.wait([task], timeout=0.3)
    assert not done
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_is_no_longer_kept_is_held_by_no_reader_who_stopped() -> None:
    clock = ManualClock()
    book = RequestBook(clock)
    running = book.open(spec(), SamplingParams())
    running.add(whole(0, *range(1000)))
    running.finish(clock.monotonic())
    reader = running.follow(10, deltas=True)
    await anext(reader)  # and stops
    await clock.advance(KEEP_S + 2)
    book.find(SampleSpec("other", "d", BASE, (1,), SamplingParams(), True, True))
    assert not running.progress
    assert not running.completions
    with pytest.raises(ServiceError) as caught:
        await anext(reader)
    assert caught.value.reason is Reason.REQUEST_NOT_FOUND


# Parameters


def test_the_fields_are_those_of_the_message() -> None:
    assert set(FIELDS) == {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}


ABSURD: dict[str, list[dict[str, object]]] = {
    "max_tokens": [{"max_tokens": 0}, {"max_tokens": -(2**31)}],
    "temperature": [{"temperature": value} for value in (-1.0, float("nan"), float("inf"), 1e-9, 1e9)],
    "top_p": [{"top_p": value} for value in (0.0, -0.1, 1.1, float("nan"))],
    "top_k": [{"top_k": value} for value in (0, -2)],
    "min_p": [{"min_p": value} for value in (-0.1, 1.1, float("nan"))],
    "stop": [{"stop": ("",)}, {"stop": ("a",) * 65}, {"stop": ("a" * 100_000,)}],
    "stop_token_ids": [{"stop_token_ids": (value,)} for value in (-1, 300, 2**31 - 1)],
    "seed": [{"seed": value} for value in (2**63, 2**64 - 1)],
    "presence_penalty": [{"presence_penalty": value} for value in (-2.1, float("nan"))],
    "frequency_penalty": [{"frequency_penalty": value} for value in (2.1, float("inf"))],
    "repetition_penalty": [{"repetition_penalty": value} for value in (0.0, -1.0, float("nan"))],
    "bad_words": [{"bad_words": (" ",)}, {"bad_words": ("a",) * 257}, {"bad_words": ("a" * 100_000,)}],
    "logit_bias": [{"logit_bias": ((300, 1.0),)}, {"logit_bias": ((1, 1e9),)}],
    "top_logprobs": [
        {"top_logprobs": -1},
        {"top_logprobs": 257},
        {"top_logprobs": 256, "max_tokens": 100_000},  # more than a message holds
    ],
    "json_schema": [
        {"json_schema": value} for value in ("{", "[]", "1", "[" * 30_000, '{"a": "' + "b" * 100_000 + '"}')
    ]
    + [{"json_schema": "{}", "ignore_eos": True}],
}


@pytest.mark.parametrize("field", sorted(ABSURD))
def test_what_makes_no_sense_is_refused_by_name(field: str) -> None:
    for values in ABSURD[field]:
        params = SamplingParams(**({"max_tokens": 8} | values))  # type: ignore[arg-type]
        with pytest.raises(ServiceError) as caught:
            check_params(params, 300)
        assert caught.value.reason is Reason.INVALID_FIELD
        assert [name for name, _ in caught.value.violations] == [f"params.{field}"], values


async def test_the_noop_engine_refuses_by_name_what_it_makes_up(tiny_model_dir: object) -> None:
    engine = NoopEngine(EngineConfig("noop", tiny_model_dir, 128))  # type: ignore[arg-type]
    info = await engine.start()
    set_to = {"stop": ("a",), "bad_words": ("a",), "logit_bias": ((1, 1.0),), "json_schema": "{}"}
    for name in set(FIELDS) - set(info.sampling_fields) - {"include_stop_in_output"}:
        default = getattr(SamplingParams(), name)
        value = set_to.get(name, True if default is False else 0.5 if isinstance(default, float) else 3)
        with pytest.raises(ServiceError) as caught:
            check_supported(SamplingParams(**{name: value}), info.sampling_fields, info.engine)  # type: ignore[arg-type]
        assert [field for field, _ in caught.value.violations] == [f"params.{name}"]


def test_a_support_table_has_an_end() -> None:
    places = [(2, (1, 2)), (0, ()), (-1, ()), (3, (4, 5, 6)), (1, (7,))]
    assert support_table(places) == ((2, 0, -1, 3, 1), (1, 2, 4, 5, 6, 7))
    assert support_table(places, max_entries=3) == ((2, 0, -1, -1, 1), (1, 2, 7))
