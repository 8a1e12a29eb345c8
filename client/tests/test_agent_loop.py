"""The agent loop on a scripted sampler and environment: what is sampled is what is trained on."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from client.tests.doubles.tokenizers import CHATML, STRIPS_THINKING, files

from opentinker import errors
from opentinker.environments.base import Environment
from opentinker.environments.content import Message
from opentinker.environments.sources import LocalEnvironment
from opentinker.environments.types import AGENT, Action, EndReason, Observation, StepResult
from opentinker.rollout.agent_loop import AgentLoop
from opentinker.rollout.episode_loop import EpisodeLoop
from opentinker.rollout.limits import Limits
from opentinker.rollout.renderer import Renderer
from opentinker.rollout.trajectory import Trajectory
from opentinker.sampling.completion import Completion, StopReason
from opentinkerapi.runtime.render import ChatTokenizer

CHAT = ChatTokenizer(files())
TRIMS = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")


class Asks(Environment):
    """Asks again until `turns` answers were given; each is worth its turn's number."""

    turns = 3

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.seen: list[str] = []

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        if self.fault == "reset":
            raise RuntimeError("no board")
        return Observation("Say something.")

    def step(self, action: Action) -> StepResult:
        self.seen.append(action.text)
        if self.fault == f"step {len(self.seen)}":
            raise RuntimeError("the board fell over")
        if len(self.seen) == self.turns:
            return StepResult(reward=float(len(self.seen)), terminated=True)
        return StepResult(Observation(f"More, please ({len(self.seen)})."), reward=float(len(self.seen)))


class Script:
    """Gives one reply after the other as token ids, and keeps the prompts it was shown."""

    def __init__(self, *replies: Sequence[int], tokenizer: ChatTokenizer = CHAT, end: bool = True) -> None:
        self.replies = list(replies)
        self.tokenizer = tokenizer
        self.end = end
        self.prompts: list[list[int]] = []
        self.rooms: list[int] = []

    async def __call__(self, turn: int, prompt: Sequence[int], room: int) -> Completion:
        self.prompts.append(list(prompt))
        self.rooms.append(room)
        ids = list(self.replies[turn % len(self.replies)])
        text = self.tokenizer.decode(ids)
        ids += [self.tokenizer.eos_ids[0]] if self.end else []
        reason = StopReason.END if self.end else StopReason.LENGTH
        return Completion(0, tuple(ids), np.full(len(ids), -0.25, np.float32), reason, text, seed=1)


async def play(
    script: Any,
    env: type[Environment] = Asks,
    *,
    tokenizer: ChatTokenizer = CHAT,
    limits: Limits | None = None,
    options: dict[str, Any] | None = None,
    context: int = 10_000,
    max_tokens: int | None = None,
) -> Trajectory:
    source = LocalEnvironment(env, options)
    (session,) = await source.open_group(task={}, seed=0, size=1)
    loop = AgentLoop(
        Renderer(tokenizer),
        script,
        group="g",
        member=0,
        version=4,
        limits=limits or Limits(),
        max_tokens=max_tokens,
        context_tokens=context,
        temperature=1.0,
    )
    episode = EpisodeLoop(session, {AGENT: loop}, limits or Limits())
    await episode.begin()
    (trajectory,) = await episode.play()
    return trajectory


def conversation(*replies: str) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": "Say something."}]
    for number, reply in enumerate(replies[:-1], start=1):
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": f"More, please ({number})."},
        ]
    return [*messages, {"role": "assistant", "content": replies[-1]}]


async def test_ids_of_three_turns_are_those_of_the_whole_conversation() -> None:
    """B61: the template ends a turn with <|im_end|> and a newline, the sampler at <|im_end|>."""
    script = Script(CHAT.encode("one"), CHAT.encode("two"), CHAT.encode("three"))
    played = await play(script)
    (segment,) = played.segments
    whole = CHAT.render(conversation("one", "two", "three"), add_generation_prompt=False)
    newline = CHAT.encode("\n")
    assert list(segment.token_ids) == whole[: -len(newline)]
    assert sum(segment.loss_mask) == sum(len(CHAT.encode(word)) + 1 for word in ("one", "two", "three"))
    sampled = [i for i, bit in zip(segment.token_ids, segment.loss_mask, strict=True) if bit]
    assert CHAT.decode(sampled, skip_special_tokens=False) == "one<|im_end|>two<|im_end|>three<|im_end|>"
    assert played.end_reason is EndReason.TERMINATED
    assert played.reward.value == 6.0
    assert [turn.reward for turn in played.turns] == [1.0, 2.0, 3.0]


async def test_sampled_ids_are_never_tokenized_again() -> None:
    """B60: "4" "2" was sampled as two tokens, and the tokenizer would make one of it."""
    two_tokens = [*CHAT.encode("4"), *CHAT.encode("2")]
    assert CHAT.encode("42") != two_tokens
    assert CHAT.decode(two_tokens) == "42"
    script = Script(two_tokens)
    played = await play(script)
    (segment,) = played.segments
    sampled = [i for i, bit in zip(segment.token_ids, segment.loss_mask, strict=True) if bit]
    assert sampled == [*two_tokens, CHAT.eos_ids[0]] * 3
    for earlier, later in zip(script.prompts, script.prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier
        assert later[len(earlier) : len(earlier) + 3] == [*two_tokens, CHAT.eos_ids[0]]


async def test_logprobs_mask_and_versions_stay_with_their_tokens() -> None:
    played = await play(Script(CHAT.encode("abc")))
    (segment,) = played.segments
    mask = np.array(segment.loss_mask, dtype=bool)
    assert len(segment.token_ids) == len(mask) == len(segment.logprobs)
    assert (segment.logprobs[mask] == np.float32(-0.25)).all()
    assert not segment.logprobs[~mask].any()
    assert not mask[0]
    covered = np.zeros(len(mask), dtype=bool)
    for start, end, version in segment.spans:
        covered[start:end] = True
        assert version == 4
    np.testing.assert_array_equal(covered, mask)


async def test_a_template_that_strips_reasoning_begins_a_new_segment() -> None:
    """B63: the history that a later turn sees is not what was sampled; each is trained as it was."""
    tokenizer = ChatTokenizer(files(STRIPS_THINKING))
    thought = tokenizer.encode("<think>hm</think>yes")
    script = Script(thought, tokenizer=tokenizer)
    played = await play(script, tokenizer=tokenizer)
    assert len(played.segments) == 3
    for segment, prompt in zip(played.segments, script.prompts, strict=True):
        assert list(segment.token_ids) == [*prompt, *thought, tokenizer.eos_ids[0]]
        assert list(segment.loss_mask) == [0] * len(prompt) + [1] * (len(thought) + 1)
    assert "think" not in tokenizer.decode(script.prompts[1], skip_special_tokens=False)


async def test_a_template_that_trims_replies_begins_a_new_segment() -> None:
    tokenizer = ChatTokenizer(files(TRIMS))
    played = await play(Script(tokenizer.encode("yes  "), tokenizer=tokenizer), tokenizer=tokenizer)
    assert len(played.segments) == 3
    straight = await play(Script(tokenizer.encode("yes"), tokenizer=tokenizer), tokenizer=tokenizer)
    assert len(straight.segments) == 1


async def test_tokens_that_merge_across_a_border_are_no_rewriting() -> None:
    """The reply begins with what merges with the end of the prompt: same text, other ids."""
    tokenizer = ChatTokenizer(files(merges=(("Ċ", "Ċ"),)))
    reply = tokenizer.encode("\nhello")
    script = Script(reply, tokenizer=tokenizer)
    played = await play(script, tokenizer=tokenizer)
    assert len(played.segments) == 1
    assert script.prompts[1][: len(script.prompts[0])] == script.prompts[0]


async def test_a_reply_cut_off_gets_its_end_from_the_template_unmasked() -> None:
    played = await play(Script(CHAT.encode("abc"), end=False))
    (segment,) = played.segments
    sampled = [i for i, bit in zip(segment.token_ids, segment.loss_mask, strict=True) if bit]
    assert sampled == CHAT.encode("abc") * 3
    text = CHAT.decode(segment.token_ids, skip_special_tokens=False)
    assert text == CHAT.render_text(conversation("abc", "abc", "abc"), None, False).removesuffix(
        "<|im_end|>\n"
    )


async def test_a_model_without_a_template_writes_on() -> None:
    tokenizer = ChatTokenizer(files(None))
    played = await play(
        Script(tokenizer.encode(" fine"), tokenizer=tokenizer, end=False), tokenizer=tokenizer
    )
    (segment,) = played.segments
    text = tokenizer.decode(segment.token_ids, skip_special_tokens=False)
    assert text == "Say something. fine\nMore, please (1). fine\nMore, please (2). fine"


async def test_special_tokens_that_a_user_types_stay_text() -> None:
    class Shouts(Asks):
        def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
            return Observation("<|im_end|>")

    script = Script(CHAT.encode("one"))
    played = await play(script, Shouts)
    assert script.prompts[0].count(CHAT.eos_ids[0]) == 1  # the template's own
    assert len(played.segments) == 1


@pytest.mark.parametrize(
    ("limits", "turns", "reason"),
    [
        (Limits(turns=2), 2, EndReason.TURN_LIMIT),
        (Limits(tokens_per_episode=60), 1, EndReason.TOKEN_LIMIT),
    ],
)
async def test_limits_end_an_episode_that_counts(limits: Limits, turns: int, reason: EndReason) -> None:
    played = await play(Script(CHAT.encode("one")), limits=limits)
    assert (len(played.turns), played.end_reason) == (turns, reason)
    assert played.counts
    assert played.reward.value == sum(range(1, turns + 1))
    assert played.segments[-1].loss_mask[-1] == 1  # nothing hangs after the last word


async def test_an_action_gets_what_is_left_of_the_limits() -> None:
    script = Script(CHAT.encode("one"))
    await play(script, limits=Limits(tokens_per_episode=200), max_tokens=50)
    assert script.rooms[0] == 50
    assert script.rooms[-1] == min(50, 200 - len(script.prompts[-1]))


async def test_a_full_context_ends_the_episode() -> None:
    played = await play(Script(CHAT.encode("one")), context=60)
    assert played.end_reason is EndReason.TOKEN_LIMIT
    assert played.counts


@pytest.mark.parametrize(("fault", "turns"), [("reset", 0), ("step 1", 1), ("step 2", 2)])
async def test_a_crash_of_the_environment_is_never_a_reward(fault: str, turns: int) -> None:
    played = await play(Script(CHAT.encode("one")), options={"fault": fault})
    assert played.end_reason is EndReason.ENV_CRASH
    assert len(played.turns) == turns
    assert played.reward.value is None
    assert not played.counts
    assert "board" in played.error


async def test_a_broken_engine_ends_the_episode_uncounted() -> None:
    """B74: an error of the engine is not an empty action."""

    async def breaks(turn: int, prompt: Sequence[int], room: int) -> Completion:
        raise errors.InternalError("boom", reason="INTERNAL")

    played = await play(breaks)
    assert (played.end_reason, played.turns, played.segments) == (EndReason.CANCELLED, (), ())
    assert not played.counts


async def test_faults_of_the_caller_are_raised() -> None:
    async def refuses(turn: int, prompt: Sequence[int], room: int) -> Completion:
        raise errors.UnsupportedOption("top_k is not supported by this engine", field="top_k")

    with pytest.raises(errors.UnsupportedOption):
        await play(refuses)

    async def too_long(turn: int, prompt: Sequence[int], room: int) -> Completion:
        raise errors.PromptTooLong("900 tokens, the context has 512")

    with pytest.raises(errors.PromptTooLong):
        await play(too_long)


async def test_time_out_of_an_episode() -> None:
    async def sleeps(turn: int, prompt: Sequence[int], room: int) -> Completion:
        await asyncio.sleep(30)
        raise AssertionError

    played = await play(sleeps, limits=Limits(wall_clock_s=0.1))
    assert played.end_reason is EndReason.EPISODE_TIMEOUT
    assert not played.counts


def test_a_system_prompt_and_several_messages_are_one_observation() -> None:
    renderer = Renderer(CHAT)
    messages = [Message("system", "Be brief."), Message("user", "Hi.")]
    assert renderer.first(messages) == CHAT.render([message.to_dict() for message in messages])
