"""Recorded episodes: an agent that only knows OpenAI's API is trained on exactly what was sampled."""

from typing import Any

import numpy as np
import openai
import pytest
from services.gateway.tests.conftest import World
from services.gateway.tests.doubles import BASE, KEY, abort
from services.gateway.tests.test_chat import ADD, CALL
from services.gateway.tests.tokenizers import STRIPS_THINKING, TAGGED

from opentinkerapi.data.v1 import trajectory_pb2
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import unpack_floats, unpack_ids

POLICY = "policies/p/versions/3"


class Player:
    """An episode, and a client that knows nothing but its address and key."""

    def __init__(self, world: World, made: dict[str, Any]) -> None:
        self.world = world
        self.id = made["id"]
        self.key = made["api_key"]
        self.client = world.client(self.key, made["base_path"])

    async def chat(self, messages: list[Any], **options: Any) -> Any:
        reply = await self.client.chat.completions.create(model="policy", messages=messages, **options)
        return reply.choices[0].message

    async def trajectory(self) -> trajectory_pb2.Trajectory:
        async with self.world.http() as http:
            accept = {"accept": "application/x-protobuf"}
            answer = await http.get(f"/episodes/{self.id}/trajectory", headers=accept)
            assert answer.status_code == 200, answer.text
            return trajectory_pb2.Trajectory.FromString(answer.content)

    async def facts(self) -> dict[str, Any]:
        async with self.world.http() as http:
            found: dict[str, Any] = (await http.get(f"/episodes/{self.id}")).json()
            return found


async def play(world: World, **more: Any) -> Player:
    async with world.http() as http:
        body = {"request_id": "r1", "model": POLICY, "group": "g", **more}
        answer = await http.post("/episodes", json=body)
        assert answer.status_code == 201, answer.text
        return Player(world, answer.json())


def rows(trajectory: trajectory_pb2.Trajectory) -> list[tuple[list[int], list[int], list[float]]]:
    """Ids, mask and logprobs of each segment."""
    found = []
    for segment in trajectory.segments:
        ids = unpack_ids(segment.chunks[0].tokens.token_ids)
        assert len(ids) == len(segment.loss_mask) == len(unpack_floats(segment.logprobs))
        found.append((ids, list(segment.loss_mask), unpack_floats(segment.logprobs).tolist()))
    return found


def trained(world: World, row: tuple[list[int], list[int], list[float]]) -> str:
    """The text of the tokens that a row trains."""
    ids = [token_id for token_id, bit in zip(row[0], row[1], strict=True) if bit]
    return world.inference.tokenizer.decode(ids, skip_special_tokens=False)


async def test_b60_later_prompts_are_the_ids_so_far_and_what_the_template_adds(world: World) -> None:
    """Three turns: each prompt begins with every id of the turn before, sampled ones included."""
    world.inference.script = ["one", "two", "three"]
    player = await play(world)
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for _ in range(3):
        reply = await player.chat(messages, temperature=0.7)
        messages += [reply.model_dump(), {"role": "user", "content": "on"}]
    prompts = [world.inference.prompt(index) for index in range(3)]
    tokenizer = world.inference.tokenizer
    for number, said in enumerate(("one", "two")):
        whole = [*prompts[number], *tokenizer.encode(said), tokenizer.eos_ids[0]]
        assert prompts[number + 1][: len(whole)] == whole
    trajectory = await player.trajectory()
    (row,) = rows(trajectory)
    assert row[0] == [*prompts[2], *tokenizer.encode("three"), tokenizer.eos_ids[0]]
    assert trained(world, row) == "one<|im_end|>two<|im_end|>three<|im_end|>"
    np.testing.assert_allclose(
        [x for x, bit in zip(row[2], row[1], strict=True) if bit][:4], [-0.25, -0.5, -0.75, -0.25]
    )
    assert not any(x for x, bit in zip(row[2], row[1], strict=True) if not bit)
    spans = [(span.start, span.end, span.version) for span in trajectory.segments[0].version_spans]
    assert [version for _, _, version in spans] == [3, 3, 3]
    assert all(all(row[1][start:end]) and not row[1][start - 1] for start, end, _ in spans)
    assert trajectory.segments[0].sampling_temperature == 0.7
    assert [turn.text for turn in trajectory.sampled_turns] == ["one", "two", "three"]
    assert [message.role for message in trajectory.messages] == ["user", "assistant"] * 3
    assert (trajectory.group_id, trajectory.policy, trajectory.turns) == ("g", POLICY, 3)


async def test_a_tool_call_is_trained_as_it_was_sampled(world: World) -> None:
    """Agents get it taken apart and give it back so; the template would write it otherwise."""
    world.use_template(TAGGED)
    odd = CALL.replace(": ", ":  ")
    world.inference.script = [f"Hm.\n{odd}", "It is 2."]
    player = await play(world)
    messages: list[Any] = [{"role": "user", "content": "1 + 1?"}]
    reply = await player.chat(messages, tools=[ADD])
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "2"}
    await player.chat([*messages, reply.model_dump(), result], tools=[ADD])
    assert odd in world.inference.prompt_text()
    (row,) = rows(await player.trajectory())
    assert trained(world, row) == f"Hm.\n{odd}<|im_end|>It is 2.<|im_end|>"


async def test_streams_are_recorded_alike(world: World) -> None:
    player = await play(world)
    stream = await player.client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "go"}], stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "hello"
    (row,) = rows(await player.trajectory())
    assert trained(world, row) == "hello<|im_end|>"


async def test_a_stream_that_its_agent_left_is_not_recorded(world: World) -> None:
    import asyncio

    from opentinker_kit.testing import wait_until

    world.inference.gate = asyncio.Event()
    player = await play(world)
    stream = await player.client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "go"}], stream=True
    )
    await anext(aiter(stream))
    await stream.close()
    await wait_until(lambda: bool(world.inference.cancelled), 30)
    assert rows(await player.trajectory()) == []


async def test_b63_a_history_that_was_rewritten_begins_a_new_segment(world: World) -> None:
    """By the template, which drops reasoning, or by the agent: never is an altered history trained."""
    world.use_template(STRIPS_THINKING)
    world.inference.script = ["<think>hm</think>four", "five", "six"]
    player = await play(world)
    messages: list[Any] = [{"role": "user", "content": "go"}]
    reply = await player.chat(messages)
    messages += [reply.model_dump(), {"role": "user", "content": "on"}]
    await player.chat(messages)
    assert "hm" not in world.inference.prompt_text()
    # The agent sums up what was said so far.
    await player.chat([{"role": "user", "content": "so far: 4, 5"}])
    found = rows(await player.trajectory())
    assert [trained(world, row) for row in found] == [
        "<think>hm</think>four<|im_end|>",
        "five<|im_end|>",
        "six<|im_end|>",
    ]


async def test_branches_share_their_beginning_and_train_it_once(world: World) -> None:
    world.inference.script = ["root", "left", "right"]
    player = await play(world)
    messages: list[Any] = [{"role": "user", "content": "go"}]
    reply = await player.chat(messages)
    messages.append(reply.model_dump())
    for way in ("left?", "right?"):
        await player.chat([*messages, {"role": "user", "content": way}])
    first, second = rows(await player.trajectory())
    assert trained(world, first) == "root<|im_end|>left<|im_end|>"
    assert trained(world, second) == "right<|im_end|>"
    start = first[0][: first[1].index(1)]
    assert second[0][: len(start) + 4] == [*start, *world.inference.tokenizer.encode("root")]


@pytest.mark.parametrize("as_ids", [False, True])
async def test_plain_completions_go_on_too(world: World, as_ids: bool) -> None:
    world.inference.script, world.inference.end = ["one", "two"], False
    player = await play(world)
    encode = world.inference.tokenizer.encode
    first, second = "Say: ", "Say: one and "
    for prompt in (first, second):
        sent: Any = encode(prompt) if as_ids else prompt
        await player.client.completions.create(model="policy", prompt=sent)
    (row,) = rows(await player.trajectory())
    assert world.inference.tokenizer.decode(row[0]) == "Say: one and two"
    assert trained(world, row) == "onetwo"


async def test_b75_a_call_that_is_made_again_is_one_turn(world: World) -> None:
    """The reply got lost on its way: the client's retry gets the same one, and nothing is sampled twice."""
    world.inference.script = ["first", "second"]
    player = await play(world)
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for headers in ({}, {"x-stainless-retry-count": "1"}):
        reply = await player.client.chat.completions.create(
            model="policy", messages=messages, extra_headers=headers
        )
        assert reply.choices[0].message.content == "first"
    assert len(world.inference.requests) == 1
    keyed = {"idempotency-key": "k"}
    for _ in range(2):
        reply = await player.client.chat.completions.create(
            model="policy", messages=messages, extra_headers=keyed
        )
        assert reply.choices[0].message.content == "second"
    assert (await player.trajectory()).turns == 2


async def test_b74_a_call_that_fails_is_no_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker_gateway.adapters.served.PAUSE_S", 0.0)

    async def fail(request: Any, context: Any) -> None:
        await abort(context, Reason.INTERNAL, "broken")

    player = await play(world)
    world.inference.before = fail
    with pytest.raises(openai.InternalServerError):
        await player.chat([{"role": "user", "content": "go"}])
    facts = await player.facts()
    assert (facts["turns"], facts["failures"]) == (0, 1)
    assert rows(await player.trajectory()) == []


async def test_seeds_and_temperature_are_the_episodes(world: World) -> None:
    seeds = []
    for request_id, seed in (("a", 1), ("b", 1), ("c", 2)):
        player = await play(world, request_id=request_id, seed=seed)
        for _ in range(2):
            await player.chat([{"role": "user", "content": "go"}], temperature=0.5)
        seeds.append([each.params.seed for each in world.inference.requests[-2:]])
        with pytest.raises(openai.BadRequestError) as caught:
            await player.chat([{"role": "user", "content": "go"}], temperature=1)
        assert caught.value.param == "temperature"
    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds[0][0] != seeds[0][1]


async def test_the_creator_overrules_the_agent(world: World) -> None:
    player = await play(world, sampling={"temperature": 0.5, "max_tokens": 7, "stop": ["x"]})
    await player.chat([{"role": "user", "content": "go"}], temperature=0.1, max_tokens=100)
    params = world.inference.requests[-1].params
    assert (params.temperature, params.max_tokens, list(params.stop)) == (0.5, 7, ["x"])
    async with world.http() as http:
        for bad, field in (({"seed": 1}, "sampling.seed"), ({"top_k": "5"}, "sampling.top_k")):
            body = {"request_id": "r2", "model": POLICY, "sampling": bad}
            answer = await http.post("/episodes", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == field


async def test_b52_what_was_cut_off_travels_along(world: World) -> None:
    """With top-p the sampler lists what it kept, so that the trainer can use the same set."""
    player = await play(world)
    await player.chat([{"role": "user", "content": "go"}], top_p=0.5)
    params = world.inference.requests[-1].params
    assert params.return_support
    assert params.top_k == 200
    (segment,) = (await player.trajectory()).segments
    sizes = unpack_ids(segment.support_sizes)
    assert sizes == [2 * bit for bit in segment.loss_mask]
    assert len(unpack_ids(segment.support_token_ids)) == sum(sizes)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"extra_body": {"repetition_penalty": 2.0}}, "repetition_penalty"),
        ({"extra_body": {"bad_words": ["x"]}}, "bad_words"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_what_could_not_be_trained_on_is_refused(
    world: World, options: dict[str, Any], param: str
) -> None:
    player = await play(world)
    with pytest.raises(openai.BadRequestError) as caught:
        await player.chat([{"role": "user", "content": "go"}], **options)
    assert caught.value.param == param
    assert world.inference.requests == []


async def test_an_episodes_key_opens_that_episode_only(world: World) -> None:
    one, two = await play(world), await play(world, request_id="r2")
    assert one.id != two.id
    stolen = world.client(one.key, f"/episodes/{two.id}/v1")
    for client in (stolen, world.client(one.key)):
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "go"}])
    for path in (f"/episodes/{one.id}", f"/episodes/{one.id}/trajectory"):
        async with world.http(one.key) as http:
            assert (await http.get(path)).status_code == 401
        async with world.http("service-key") as http:
            assert (await http.get(path)).status_code == 404, "somebody else's"
    await one.chat([{"role": "user", "content": "go"}])
    assert world.inference.keys == [f"Bearer {KEY}"], "calls are made with the key of who made the episode"
    with pytest.raises(openai.NotFoundError):
        await one.client.chat.completions.create(model=BASE, messages=[{"role": "user", "content": "go"}])


async def test_an_episode_that_ended_is_gone(world: World) -> None:
    player = await play(world)
    again = await play(world)
    assert (again.id, again.key) == (player.id, player.key), "made twice with one request id"
    async with world.http() as http:
        assert (await http.delete(f"/episodes/{player.id}")).status_code == 204
        assert (await http.get(f"/episodes/{player.id}")).status_code == 404
    with pytest.raises(openai.AuthenticationError):
        await player.chat([{"role": "user", "content": "go"}])


@pytest.mark.parametrize("world", [{"max_episodes": 2, "max_episode_tokens": 60}], indirect=True)
async def test_memory_is_bounded(world: World) -> None:
    player = await play(world)
    await play(world, request_id="r2")
    async with world.http() as http:
        answer = await http.post("/episodes", json={"request_id": "r3", "model": POLICY})
        assert answer.status_code == 429
    with pytest.raises(openai.RateLimitError, match="60 tokens"):
        await player.chat([{"role": "user", "content": "x" * 60}])


@pytest.mark.parametrize("world", [{"episode_idle_s": 0.3}], indirect=True)
async def test_an_episode_that_nobody_plays_is_forgotten(world: World) -> None:
    import asyncio

    player = await play(world)
    await asyncio.sleep(0.5)
    async with world.http() as http:
        assert (await http.get(f"/episodes/{player.id}")).status_code == 404


async def test_limits_of_an_episode_refuse_the_call_after_them(world: World) -> None:
    player = await play(world, max_calls=2)
    for _ in range(2):
        await player.chat([{"role": "user", "content": "go"}])
    with pytest.raises(openai.BadRequestError) as caught:
        await player.chat([{"role": "user", "content": "on"}])
    assert caught.value.code == "context_length_exceeded"
    facts = await player.facts()
    assert (facts["turns"], facts["limit"], facts["lost"]) == (2, "calls", "")
    # The same request id with another limit is another request.
    async with world.http() as http:
        body = {"request_id": "r1", "model": POLICY, "group": "g", "max_calls": 3}
        assert (await http.post("/episodes", json=body)).status_code == 409

    player = await play(world, request_id="r2", max_tokens=40)
    await player.chat([{"role": "user", "content": "go"}], max_tokens=1000)
    asked = world.inference.requests[-1].params.max_tokens
    assert asked == 40 - len(world.inference.prompt())
    with pytest.raises(openai.BadRequestError):
        await player.chat([{"role": "user", "content": "go " * 60}])
    assert (await player.facts())["limit"] == "tokens"


async def test_a_call_that_we_lost_is_told_until_it_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker_gateway.adapters.served.PAUSE_S", 0.0)
    failing = True

    async def fail(request: Any, context: Any) -> None:
        if failing:
            await abort(context, Reason.INTERNAL, "broken")

    world.inference.before = fail
    player = await play(world)
    messages: list[Any] = [{"role": "user", "content": "go"}]
    with pytest.raises(openai.InternalServerError):
        await player.chat(messages)
    assert (await player.facts())["lost"].startswith("INTERNAL")
    with pytest.raises(openai.BadRequestError):
        await player.chat(messages, n=2)
    failing = False
    await player.chat([{"role": "user", "content": "something else"}])
    assert (await player.facts())["lost"].startswith("INTERNAL")
    await player.chat(messages)
    facts = await player.facts()
    assert (facts["lost"], facts["turns"], facts["failures"]) == ("", 2, 2)


async def test_the_key_of_an_episode_talks_and_does_nothing_else(world: World) -> None:
    """What an agent holds opens neither its own record nor another episode: nothing that bears on rewards."""
    player = await play(world)
    other = await play(world, request_id="r2")
    async with world.http(player.key) as http:
        body = {"request_id": "r3", "model": POLICY, "group": "g"}
        answers = [
            await http.post("/episodes", json=body),
            await http.get(f"/episodes/{player.id}/trajectory"),
            await http.get(f"/episodes/{player.id}"),
            await http.delete(f"/episodes/{player.id}"),
            await http.get(f"/episodes/{other.id}/v1/models"),
            await http.get("/v1/models"),
            await http.post("/v1/chat/completions", json={"model": POLICY, "messages": []}),
        ]
        assert {answer.status_code for answer in answers} == {401}, [each.text for each in answers]
        assert (await http.get(f"/episodes/{player.id}/v1/models")).status_code == 200
