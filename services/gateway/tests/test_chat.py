"""Chat completions, asked for by OpenAI's own Python client."""

import asyncio
import json
from typing import Any

import openai
import pytest
from services.gateway.tests.conftest import World
from services.gateway.tests.doubles import BASE, KEY, abort
from services.gateway.tests.tokenizers import BARE, CHATML, TAGGED

from opentinker_kit.testing import wait_until
from opentinkerapi.runtime.reasons import Reason

HI: list[Any] = [{"role": "user", "content": "hi"}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def test_a_reply_with_everything_about_it(world: World) -> None:
    reply = await world.client().chat.completions.create(
        model="policies/p",
        messages=[{"role": "developer", "content": "be brief"}, *HI],
        temperature=0.5,
        top_p=0.9,
        stop=["x", "y"],
        seed=7,
        presence_penalty=0.25,
        frequency_penalty=-0.25,
        logit_bias={"5": -2},
        max_completion_tokens=20,
        logprobs=True,
        top_logprobs=2,
        user="someone",
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "stop_token_ids": [9]},
    )
    (choice,) = reply.choices
    assert choice.message.content == "hello"
    assert choice.finish_reason == "stop"
    assert reply.model == "policies/p"
    assert reply.system_fingerprint == "policies/p/versions/3"
    asked = world.inference.requests[-1]
    assert asked.model.policy_version.version == 3
    assert asked.attempt == 1
    assert asked.job_token == "token-of-the-job"
    assert world.inference.keys == [f"Bearer {KEY}"]
    params = asked.params
    assert list(params.stop) == ["x", "y"]
    assert dict(params.logit_bias) == {5: -2.0}
    assert list(params.stop_token_ids) == [9]
    for name, value in {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "max_tokens": 20,
        "top_logprobs": 2,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
    }.items():
        assert getattr(params, name) == value, name
    assert world.inference.prompt_text() == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == [*"hello", "<|im_end|>"]
    first = choice.logprobs.content[0]
    assert first.bytes == [ord("h")]
    assert first.logprob == -0.25
    assert [top.logprob for top in first.top_logprobs] == [-0.25, -9999.0]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(world.inference.prompt())
    assert reply.usage.completion_tokens == 6
    await wait_until(lambda: world.inference.acknowledged == [asked.request_id], 5)
    assert world.inference.cancelled == []


async def test_zero_and_false_are_values(world: World) -> None:
    await world.client().chat.completions.create(model=BASE, messages=HI, temperature=0, seed=0)
    params = world.inference.requests[-1].params
    assert params.HasField("temperature")
    assert params.HasField("seed")
    assert not params.HasField("top_p")
    assert not params.HasField("max_tokens")


async def test_n_replies(world: World) -> None:
    reply = await world.client().chat.completions.create(model=BASE, messages=HI, n=3)
    assert [choice.message.content for choice in reply.choices] == ["hello", "hello1", "hello2"]
    assert len(world.inference.requests) == 1, "they share one request, and so one prefill"


async def test_a_stream(world: World) -> None:
    world.inference.script = ["naïve 🙂"]
    stream = await world.client().chat.completions.create(
        model=BASE, messages=HI, stream=True, n=2, logprobs=True, stream_options={"include_usage": True}
    )
    texts, reasons, tokens, usage = ["", ""], ["", ""], 0, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert "\ufffd" not in (choice.delta.content or "")
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
            if choice.logprobs is not None:
                tokens += len(choice.logprobs.content or [])
    assert texts == ["naïve 🙂", "naïve 🙂1"]
    assert reasons == ["stop", "stop"]
    assert usage is not None
    # Every token is told once, whatever text was held back until its character was whole.
    assert usage.completion_tokens == tokens == sum(len(text.encode()) + 1 for text in texts)


@pytest.mark.parametrize("template", [CHATML, TAGGED, BARE], ids=["no tools", "tagged", "bare"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools(world: World, template: str, stream: bool) -> None:
    """The same client code whatever the model's template knows of tools."""
    world.use_template(template)
    said = CALL if template is not BARE else '{"name": "add", "arguments": {"a": 1}}'
    world.inference.script = [said, "It is 2."]
    client = world.client()
    messages: list[Any] = [{"role": "user", "content": "1 + 1?"}]
    if stream:
        content, calls = "", {}
        async for chunk in await client.chat.completions.create(
            model=BASE, messages=messages, tools=[ADD], stream=True
        ):
            for choice in chunk.choices:
                content += choice.delta.content or ""
                calls |= {call.index: call for call in choice.delta.tool_calls or []}
                reason = choice.finish_reason
        assert content == ""
        (call,) = calls.values()
        assert call.function is not None
        name, arguments = call.function.name, call.function.arguments
        answer = {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude={"index"})]}
    else:
        (choice,) = (await client.chat.completions.create(model=BASE, messages=messages, tools=[ADD])).choices
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        (made,) = choice.message.tool_calls
        assert made.type == "function"
        reason, call = choice.finish_reason, made  # type: ignore[assignment]
        name, arguments = made.function.name, made.function.arguments
        answer = choice.message.model_dump()
    assert reason == "tool_calls"
    assert (name, json.loads(arguments or "")) == ("add", {"a": 1})
    assert '"add"' in world.inference.prompt_text()
    messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": "the tool says 2"}]
    reply = await client.chat.completions.create(model=BASE, messages=messages, tools=[ADD])
    assert reply.choices[0].message.content == "It is 2."
    assert reply.choices[0].finish_reason == "stop"
    prompt = world.inference.prompt_text()
    assert "the tool says 2" in prompt
    assert said in prompt


async def test_tools_that_may_not_be_called_are_not_shown(world: World) -> None:
    world.inference.script = [CALL]
    reply = await world.client().chat.completions.create(
        model=BASE, messages=HI, tools=[ADD], tool_choice="none"
    )
    assert reply.choices[0].message.content == CALL
    assert reply.choices[0].finish_reason == "stop"
    assert "add" not in world.inference.prompt_text()


async def test_b66_what_is_no_call_is_text(world: World) -> None:
    """Broken JSON, or a tool that nobody offered, neither fails nor vanishes."""
    for said in (
        '<tool_call>\n{"a":',
        "<tool_call>{nonsense}</tool_call> and more",
        CALL.replace("add", "rm"),
    ):
        world.inference.script = [said]
        world.inference.requests.clear()
        reply = await world.client().chat.completions.create(model=BASE, messages=HI, tools=[ADD])
        assert reply.choices[0].message.content == said
        assert reply.choices[0].message.tool_calls is None
        assert reply.choices[0].finish_reason == "stop"


async def test_a_schema_needs_an_engine_that_can(world: World) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        await world.client().chat.completions.create(model=BASE, messages=HI, response_format=form)
    assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as caught:
        await world.client().chat.completions.create(
            model=BASE, messages=HI, tools=[ADD], tool_choice="required"
        )
    assert caught.value.param == "tool_choice"
    world.inference.fields = (*world.inference.fields, "json_schema")
    world.scheduler.attempt += 1
    world.inference.script = ["null", '{"name": "add", "arguments": {"a": 5}}']
    await world.client().chat.completions.create(model="policies/p", messages=HI, response_format=form)
    assert json.loads(world.inference.requests[-1].params.json_schema) == {"type": "null"}
    reply = await world.client().chat.completions.create(
        model="policies/p",
        messages=HI,
        tools=[ADD],
        tool_choice={"type": "function", "function": {"name": "add"}},
    )
    schema = json.loads(world.inference.requests[-1].params.json_schema)
    assert schema["anyOf"][0]["properties"]["name"] == {"const": "add"}
    assert world.inference.prompt_text().endswith("<tool_call>\n")
    assert reply.choices[0].message.tool_calls is not None
    assert reply.choices[0].finish_reason == "tool_calls"


async def test_a_reader_that_leaves_frees_the_slot(world: World) -> None:
    world.inference.script = ["x" * 1000]
    world.inference.gate = asyncio.Event()
    stream = await world.client().chat.completions.create(model=BASE, messages=HI, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await wait_until(lambda: len(world.inference.cancelled) == 1, 10)
    # The same without a stream: a client that gives up waiting.
    asking = asyncio.ensure_future(world.client().chat.completions.create(model=BASE, messages=HI))
    await wait_until(lambda: len(world.inference.requests) == 2, 10)
    asking.cancel()
    await wait_until(lambda: len(world.inference.cancelled) == 2, 10)
    assert world.inference.cancelled == [each.request_id for each in world.inference.requests]


async def test_an_engine_that_dies_in_the_middle_is_not_noticed(world: World) -> None:
    """The request goes on under its id; what had been streamed is not streamed again."""
    world.inference.script = ["one two three"]
    world.inference.break_after = 4
    stream = await world.client().chat.completions.create(model="policies/p", messages=HI, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "one two three"
    assert len({each.request_id for each in world.inference.requests}) == 1
    assert len(world.inference.requests) == 2


async def test_an_engine_that_says_something_else_after_its_death_is_an_error(world: World) -> None:
    world.inference.script = ["one two three", "one fou"]
    world.inference.break_after = 6
    stream = await world.client().chat.completions.create(model="policies/p", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="does not say the same"):
        async for _ in stream:
            pass


async def test_a_failure_in_a_stream_is_told_in_it(world: World) -> None:
    async def fail(request: Any, context: Any) -> None:
        await abort(context, Reason.INVALID_FIELD, "top_p must be in (0, 1]", "params.top_p")

    world.inference.before = fail
    with pytest.raises(openai.BadRequestError) as caught:
        await world.client().chat.completions.create(model=BASE, messages=HI, top_p=2, stream=True)
    assert caught.value.param == "top_p"
    assert caught.value.code == "invalid_field"


async def test_the_same_idempotency_key_is_the_same_request(world: World) -> None:
    headers = {"Idempotency-Key": "abc"}
    for _ in range(2):
        await world.client().chat.completions.create(model=BASE, messages=HI, extra_headers=headers)
    first, second = world.inference.requests
    assert first.request_id == second.request_id
    assert world.inference.acknowledged == []
