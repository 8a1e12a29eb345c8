"""Plain completions, asked for by OpenAI's own Python client."""

import openai
import pytest
from services.gateway.tests.conftest import World
from services.gateway.tests.doubles import BASE


async def test_a_text_and_its_logprobs_with_the_prompt_before_it(world: World) -> None:
    reply = await world.client().completions.create(
        model=BASE, prompt="ab", echo=True, logprobs=2, max_tokens=9, seed=4, stop="zz"
    )
    (choice,) = reply.choices
    assert choice.text == "abhello"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [*"abhello", "<|im_end|>"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6, 7]
    assert choice.logprobs.token_logprobs == [None, -2.0, -0.25, -0.5, -0.75, -0.25, -0.5, -0.75]
    params = world.inference.requests[-1].params
    assert (params.max_tokens, params.seed, list(params.stop)) == (9, 4, ["zz"])
    assert params.prompt_logprobs


async def test_the_default_length_is_openais(world: World) -> None:
    await world.client().completions.create(model=BASE, prompt="ab")
    assert world.inference.requests[-1].params.max_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_of_texts_or_ids(world: World, stream: bool) -> None:
    world.inference.end = False
    for prompt in (["ab", "cd"], [[97, 98], [99, 100]]):
        world.inference.requests.clear()
        found = [""] * 4
        if stream:
            async for chunk in await world.client().completions.create(
                model=BASE, prompt=prompt, n=2, seed=10, stream=True
            ):
                for choice in chunk.choices:
                    found[choice.index] += choice.text
        else:
            reply = await world.client().completions.create(model=BASE, prompt=prompt, n=2, seed=10)
            found = [choice.text for choice in reply.choices]
            assert {choice.finish_reason for choice in reply.choices} == {"length"}
        assert found == ["hello", "hello1", "hello", "hello1"]
        asked = sorted(world.inference.requests, key=lambda each: each.params.seed)
        assert [each.params.seed for each in asked] == [10, 12]
        prompts = {world.inference.prompt_text(index) for index in range(2)}
        expected = (
            {"ab", "cd"}
            if isinstance(prompt[0], str)
            else {
                world.inference.tokenizer.decode(ids)
                for ids in prompt  # type: ignore[arg-type]
            }
        )
        assert prompts == expected


async def test_one_prompt_that_fails_fails_the_request(world: World) -> None:
    world.inference.context_tokens = 50
    with pytest.raises(openai.BadRequestError) as caught:
        await world.client().completions.create(model=BASE, prompt=["ab", "x" * 60])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
