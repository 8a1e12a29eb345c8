"""What a caller of `sample`, `stream_tokens` and `load` may ask for, and what comes back."""

import asyncio
from collections import defaultdict

import numpy as np
import pytest
from client.tests.doubles.cluster import World

import opentinker as ot
from opentinker import errors
from opentinker.environments.builtin.guess_number import GuessNumber
from opentinker.sampling.reading import Reading
from opentinkerapi.inference.v1 import sampling_pb2

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
FLOATS = np.array([-0.5, -0.25], np.float32)


@pytest.fixture
def policy(doubles: World) -> ot.Policy:
    return doubles.cluster.create_policy("tiny").result()


def speak(version: int, seed: int, prompt: list[int]) -> str:
    return f"{seed}-{'ab' * 3}"


async def read(policy: ot.Policy, **options: object) -> list[ot.Delta | ot.Completion]:
    return [event async for event in policy.stream_tokens([5, 6], **options)]  # type: ignore[arg-type]


def joined(events: list[ot.Delta | ot.Completion]) -> dict[int, tuple[tuple[int, ...], list[float], str]]:
    ids: dict[int, list[int]] = defaultdict(list)
    logprobs: dict[int, list[float]] = defaultdict(list)
    texts: dict[int, str] = defaultdict(str)
    for event in events:
        if isinstance(event, ot.Delta):
            ids[event.index] += event.token_ids
            logprobs[event.index] += event.logprobs.tolist()
            texts[event.index] += event.text
    return {index: (tuple(ids[index]), logprobs[index], texts[index]) for index in ids}


def whole(events: list[ot.Delta | ot.Completion]) -> dict[int, tuple[tuple[int, ...], list[float], str]]:
    found = [event for event in events if isinstance(event, ot.Completion)]
    assert len({completion.index for completion in found}) == len(found)
    return {each.index: (each.token_ids, each.logprobs.tolist(), each.text) for each in found}


def test_every_field_reaches_the_server(doubles: World, policy: ot.Policy) -> None:
    params = ot.SamplingParams(
        max_tokens=9,
        json_schema=SCHEMA,
        include_stop_in_output=True,
        top_logprobs=3,
        raw_logprobs=True,
        prompt_logprobs=True,
    )
    (completion,) = policy.sample([5, 6], params, seed=1).result()
    asked = doubles.inference.requests[-1].params
    names = {field.name for field, _ in asked.ListFields()}
    assert names >= {
        "json_schema",
        "include_stop_in_output",
        "top_logprobs",
        "raw_logprobs",
        "prompt_logprobs",
    }
    assert asked.json_schema == '{"type": "object", "properties": {"n": {"type": "integer"}}}'
    count = len(completion.token_ids)
    assert completion.raw_logprobs is not None
    assert completion.top_token_ids is not None
    assert completion.top_logprobs is not None
    assert completion.prompt_logprobs is not None
    assert completion.raw_logprobs.shape == (count,)
    assert completion.top_token_ids.shape == completion.top_logprobs.shape == (count, 3)
    assert np.isnan(completion.prompt_logprobs[0])
    assert completion.prompt_logprobs[1] == -1.0
    plain = policy.sample([5, 6], seed=1).result()[0]
    assert plain.raw_logprobs is plain.top_token_ids is plain.top_logprobs is plain.prompt_logprobs is None
    assert {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields} == {
        *ot.SamplingParams.__dataclass_fields__,
        "seed",
    }


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(errors.InvalidArgument, match="is no JSON") as refused:
        ot.SamplingParams(json_schema="{")
    assert refused.value.field == "json_schema"
    with pytest.raises(errors.InvalidArgument) as refused:
        ot.SamplingParams(top_logprobs=-1)
    assert refused.value.field == "top_logprobs"
    # A schema changes the logits, so a loss with a ratio has none of the trainer's.
    assert not ot.SamplingParams(json_schema=SCHEMA).plain


@pytest.mark.parametrize("name", ["top_logprobs", "raw_logprobs", "prompt_logprobs"])
def test_what_nobody_would_keep_is_refused(policy: ot.Policy, name: str) -> None:
    params = ot.SamplingParams(**{name: True})  # type: ignore[arg-type]
    served = policy.cluster.model("policies/p")
    asks = (
        lambda: policy.chat("Hello", params),
        lambda: served.chat("Hello", params).result(),
        lambda: ot.evaluate(policy, GuessNumber, tasks=1, sampling=params),
        lambda: ot.rollouts(policy, GuessNumber, groups=1, group_size=1, params=params),
    )
    for ask in asks:
        with pytest.raises(errors.UnsupportedOption, match=r"policy\.sample") as refused:
            ask()
        assert refused.value.field.endswith(f".{name}")


def test_swaps(doubles: World, policy: ot.Policy) -> None:
    """B80: by the caller's choice."""
    policy.load(0).result()
    policy.load(0, on_swap="continue").result()
    assert doubles.inference.swaps == [sampling_pb2.SWAP_POLICY_DRAIN, sampling_pb2.SWAP_POLICY_CONTINUE]
    policy.sample([5], on_swap="continue").result()
    assert doubles.inference.requests[-1].swap_policy == sampling_pb2.SWAP_POLICY_CONTINUE
    with pytest.raises(errors.InvalidArgument, match="'drain' or 'continue', not 'stop'") as refused:
        policy.sample([5], on_swap="stop").result()  # type: ignore[arg-type]
    assert refused.value.field == "on_swap"


def test_tokens_come_one_by_one_and_joined_are_the_completions(doubles: World, policy: ot.Policy) -> None:
    doubles.inference.speak = speak
    params = ot.SamplingParams(prompt_logprobs=True)
    # On another loop than the client's.
    events = asyncio.run(read(policy, params=params, n=2, seed=3))
    assert joined(events) == whole(events)
    assert len(events) > 8
    for index in (0, 1):
        of_one = [event for event in events if event.index == index]
        assert isinstance(of_one[-1], ot.Completion)
        assert of_one[-1].text == f"{3 + index}-ababab"
        assert of_one[-1].prompt_logprobs is not None
        assert not any(isinstance(event, ot.Completion) for event in of_one[:-1])
        ends = [event.spans[-1][1] for event in of_one if isinstance(event, ot.Delta)]
        assert ends == list(range(1, len(of_one)))


def test_a_stream_that_breaks_off_is_taken_up_where_it_was(doubles: World, policy: ot.Policy) -> None:
    doubles.inference.speak = speak
    doubles.inference.break_text_after = 4
    events = asyncio.run(read(policy, n=2, seed=3))
    assert joined(events) == whole(events)
    assert len(doubles.inference.requests) == 2
    assert len({request.request_id for request in doubles.inference.requests}) == 1


def test_a_successor_that_says_other_things_ends_the_stream(doubles: World, policy: ot.Policy) -> None:
    replies = iter(["abcdef", "abxdef"])
    doubles.inference.speak = lambda *_: next(replies)
    doubles.inference.break_text_after = 4
    seen = []

    async def play() -> None:
        async for event in policy.stream_tokens([5, 6], seed=3):
            seen.append(event)

    with pytest.raises(errors.Unavailable, match="another one sampled other tokens") as lost:
        asyncio.run(play())
    assert lost.value.reason == errors.Reason.CONNECTION_LOST
    assert "".join(event.text for event in seen) == "abcd"


def test_who_stops_reading_frees_the_slot(doubles: World, policy: ot.Policy) -> None:
    doubles.inference.speak = speak
    doubles.inference.pause_s = 0.05

    async def first() -> ot.Delta | ot.Completion:
        stream = policy.stream_tokens([5, 6], seed=3)
        event = await anext(stream)
        await stream.aclose()
        return event

    assert asyncio.run(first()).text == "3"
    doubles.portal.run(policy.sampler.close())
    assert doubles.inference.cancelled == [doubles.inference.requests[-1].request_id]


def test_a_delta_that_overlaps_what_was_given() -> None:
    table = np.arange(6).reshape(3, 2).astype(np.int32)
    reading = Reading()
    assert reading.delta(ot.Delta(0, (1, 2), FLOATS, "ab", ((0, 2, 7),))) is not None
    reading.begin()
    delta = ot.Delta(
        0, (1, 2, 3), np.arange(3).astype(np.float32), "abc", ((0, 1, 7), (1, 3, 8)), table, table * 0.5
    )
    new = reading.delta(delta)
    assert new is not None
    assert (new.token_ids, new.text, new.spans) == ((3,), "c", ((2, 3, 8),))
    assert new.logprobs.tolist() == [2.0]
    assert new.top_token_ids is not None
    assert new.top_logprobs is not None
    assert new.top_token_ids.tolist() == [[4, 5]]
    assert new.top_logprobs.tolist() == [[2.0, 2.5]]
    # Text that was held back comes without tokens.
    held = reading.delta(ot.Delta(0, (), FLOATS[:0], "d"))
    assert held is not None
    assert held.text == "d"
