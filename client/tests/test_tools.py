"""Tools: schemas of typed functions, calls in what models write, environments made of tools."""

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
from client.tests.doubles.tokenizers import CHATML, files

import opentinker as ot
from opentinker.environments import Content, InvalidEpisodeData, describe
from opentinker.environments.errors import EnvironmentDefinitionError
from opentinker.environments.sources import LocalEnvironment
from opentinker.environments.types import AGENT
from opentinker.rollout.agent_loop import AgentLoop
from opentinker.rollout.episode_loop import EpisodeLoop
from opentinker.rollout.limits import Limits
from opentinker.rollout.renderer import Renderer
from opentinker.rollout.tool_calls import MAX_CALL_CHARACTERS, MAX_CALLS, parse, repaired
from opentinker.rollout.trajectory import Trajectory
from opentinker.sampling.completion import Completion, StopReason
from opentinkerapi.runtime.render import ChatTokenizer

SHOWS_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML


@ot.tool
def convert(
    amount: float,
    unit: Literal["m", "ft"],
    digits: Annotated[int, "How many."] = 2,
    names: list[str] | None = None,
    extra: dict[str, int] | None = None,
) -> str:
    """Convert a length.

    Args:
        amount: what to convert
        unit: what it is in

    Nothing else.
    """
    return f"{amount:.{digits}f} {unit} {names} {extra}"


class Shop(ot.ToolEnvironment):
    """Buy what is asked for."""

    tools = (convert,)

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        self.bought = 0
        return ot.Observation("Buy three apples, then say how many you have.")

    @ot.tool
    def buy(self, item: str, count: int = 1) -> dict[str, int]:
        """Buy something."""
        if item != "apple":
            raise ot.ToolError(f"there is no {item}")
        self.bought += count
        return {"bought": self.bought}

    @ot.tool(name="look")
    async def look_around(self) -> Content:
        """What there is."""
        return Content.of("apples")

    def answered(self, text: str) -> ot.StepResult:
        return ot.StepResult(reward=float(text == str(self.bought) == "3"), terminated=True)


def test_a_typed_function_is_a_schema() -> None:
    assert convert.schema == {
        "type": "function",
        "function": {
            "name": "convert",
            "description": "Convert a length.",
            "parameters": {
                "type": "object",
                "properties": {
                    "amount": {"type": "number", "description": "what to convert"},
                    "unit": {"enum": ["m", "ft"], "description": "what it is in"},
                    "digits": {"type": "integer", "description": "How many.", "default": 2},
                    "names": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                    "extra": {
                        "anyOf": [
                            {"type": "object", "additionalProperties": {"type": "integer"}},
                            {"type": "null"},
                        ]
                    },
                },
                "required": ["amount", "unit"],
                "additionalProperties": False,
            },
        },
    }
    assert convert(1.0, "m", digits=1) == "1.0 m None None"
    assert [tool.name for tool in Shop.tools] == ["convert", "buy", "look"]
    assert [schema["function"]["name"] for schema in describe(Shop).tools] == ["convert", "buy", "look"]
    assert "self" not in json.dumps(describe(Shop).tools)


def test_functions_that_are_no_tools_are_refused() -> None:
    def untyped(x) -> int:  # type: ignore[no-untyped-def]
        return 1

    def many(*x: int) -> int:
        return 1

    def strange(x: bytes) -> int:
        return 1

    def keys(x: dict[int, str]) -> int:
        return 1

    for function, message in (
        (untyped, "'x' of the tool untyped has no type"),
        (many, "name its arguments"),
        (strange, r"strange\(x\): .*bytes.* has no JSON schema"),
        (keys, "keys of a JSON object"),
    ):
        with pytest.raises(EnvironmentDefinitionError, match=message):
            ot.tool(function)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{", "are no JSON"),
        ('{"amount": NaN, "unit": "m"}', "NaN is no number"),
        ("[" * 100_000, "are no JSON"),
        ("[]", "arguments must be of type object"),
        ('{"unit": "m"}', "amount missing"),
        ('{"amount": "1", "unit": "m"}', "arguments.amount must be of type number"),
        ('{"amount": true, "unit": "m"}', "arguments.amount must be of type number"),
        ('{"amount": 1, "unit": "km"}', r"arguments.unit must be one of \['m', 'ft'\]"),
        ('{"amount": 1, "unit": "m", "digits": 1.5}', "arguments.digits must be of type integer"),
        ('{"amount": 1, "unit": "m", "speed": 1}', "arguments has no 'speed'; it takes amount"),
        ('{"amount": 1, "unit": "m", "names": ["a", 1]}', r"arguments.names\[1\] must be of type string"),
        ('{"amount": 1, "unit": "m", "extra": {"a": "b"}}', "arguments.extra.a must be of type integer"),
    ],
)
def test_arguments_are_checked(arguments: str, message: str) -> None:
    with pytest.raises(ot.ToolError, match=message):
        convert.read(arguments)


def test_arguments_that_are_right_are_taken() -> None:
    given = '{"amount": 1, "unit": "m", "names": null, "extra": {"a": 1}}'
    assert convert.read(given) == {"amount": 1, "unit": "m", "names": None, "extra": {"a": 1}}


# --- calls in what models write -------------------------------------------------------------------------

ADD = {"a": 1, "b": [True, None, "x"]}
PLAIN = json.dumps({"name": "add", "arguments": ADD})


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{PLAIN}\n</tool_call>",
        f"<tool_call>{PLAIN}",
        f"<tool_call>\n```json\n{PLAIN}\n```\n</tool_call>",
        json.dumps({"name": "add", "parameters": ADD}),
        f"<|python_tag|>{PLAIN}",
        f"```json\n{PLAIN}\n```",
        "<tool_call>{'name': 'add', 'arguments': {'a': 1, 'b': [True, None, 'x',],},}</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [true, null, "x"]</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [true, null, "x</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [true, null, "x"]}}}}</tool_call>',
        json.dumps({"name": "add", "arguments": json.dumps(ADD)}),
    ],
)
def test_calls_of_both_families_are_read_and_repaired(text: str) -> None:
    parsed = parse(text, ["add"])
    assert not parsed.problems
    (call,) = parsed.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", ADD)
    assert parsed.text == ""


def test_several_calls_and_the_text_around_them() -> None:
    two = parse(f"I add.\n<tool_call>{PLAIN}</tool_call>\n<tool_call>{PLAIN}</tool_call> Done", ["add"])
    assert [call.id for call in two.tool_calls] == ["call-1", "call-2"]
    assert two.text.split() == ["I", "add.", "Done"]
    strings = '{"name": "say", "parameters": {"text": "a;b\\"};"}}; {"name": "say", "parameters": {}}'
    assert [json.loads(call.arguments) for call in parse(strings, ["say"]).tool_calls] == [
        {"text": 'a;b"};'},
        {},
    ]


@pytest.mark.parametrize(
    "text", ["7", "The set {1, 2}.", '{"answer": 3}', "", "tool_call", 'Use {"name": "add"} here']
)
def test_what_is_no_call_is_text(text: str) -> None:
    parsed = parse(text, ["add"])
    assert (parsed.text, parsed.tool_calls, parsed.problems) == (text, (), ())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add 1 and 2", "it is no JSON"),
        ("", "it is no JSON"),
        ("[1]", 'a call is {"name"'),
        ('{"name": 3}', 'a call is {"name"'),
        ('{"name": "add", "arguments": [1]}', "must be an object"),
        ('{"name": "sub", "arguments": {}}', "there is no tool 'sub'; tools: add"),
        ('{"name": "add", "arguments": {"a": NaN}}', "it is no JSON"),
        ('{"name": "add", "arguments": "{"}', ""),
        ("[" * 60_000, "nested too deeply"),
        ("{" * 60_000, ""),
        ("x" * (MAX_CALL_CHARACTERS + 1), "are over the"),
        ("__import__('os').system('touch never')", "it is no JSON"),
        ("9**9**9", "it is no JSON"),
    ],
)
def test_b66_what_cannot_be_read_is_said_and_costs_little(body: str, message: str) -> None:
    started = time.process_time()
    parsed = parse(f"<tool_call>{body}</tool_call>", ["add"])
    assert time.process_time() - started < 1
    if body == '{"name": "add", "arguments": "{"}':
        assert parsed.tool_calls  # an object that was left open
        return
    assert not parsed.tool_calls
    (problem,) = parsed.problems
    assert problem.startswith("malformed tool call: ")
    assert message in problem


def test_half_of_the_calls_is_none() -> None:
    parsed = parse(f"<tool_call>{PLAIN}</tool_call><tool_call>oops</tool_call>", ["add"])
    assert (len(parsed.tool_calls), len(parsed.problems)) == (0, 1)
    parsed = parse(f"<tool_call>{PLAIN}</tool_call>" * (MAX_CALLS + 1), ["add"])
    assert (len(parsed.tool_calls), len(parsed.problems)) == (0, 1)


def test_strings_keep_what_looks_like_a_mistake() -> None:
    assert repaired('{"text": "True, None,] \'x\'"}') == {"text": "True, None,] 'x'"}
    assert repaired("{'it': 'say \"hi\"', 'b': 'it\\'s'}") == {"it": 'say "hi"', "b": "it's"}
    assert repaired('{"lines": "a\nb"}') == {"lines": "a\nb"}
    with pytest.raises(InvalidEpisodeData):
        repaired("{a: 1}")


# --- episodes -------------------------------------------------------------------------------------------


class Says:
    def __init__(self, tokenizer: ChatTokenizer, replies: Sequence[str]) -> None:
        self.tokenizer, self.replies = tokenizer, replies
        self.prompts: list[str] = []

    async def __call__(self, turn: int, prompt: Sequence[int], room: int) -> Completion:
        self.prompts.append(self.tokenizer.decode(list(prompt), skip_special_tokens=False))
        text = self.replies[min(turn, len(self.replies) - 1)]
        ids = (*self.tokenizer.encode(text), self.tokenizer.eos_ids[0])
        return Completion(0, ids, np.full(len(ids), -0.5, np.float32), StopReason.END, text, seed=0)


async def play(
    *replies: str,
    env: type[ot.Environment] = Shop,
    template: str | None = SHOWS_TOOLS,
    limits: Limits | None = None,
) -> tuple[Trajectory, Says]:
    tokenizer = ChatTokenizer(files(template))
    says = Says(tokenizer, replies)
    source = LocalEnvironment(env)
    (session,) = await source.open_group(task={}, seed=0, size=1)
    limits = limits or Limits()
    loop = AgentLoop(
        Renderer(tokenizer, source.info.tools),
        says,
        group="g",
        member=0,
        version=0,
        limits=limits,
        max_tokens=None,
        context_tokens=100_000,
        temperature=1.0,
    )
    episode = EpisodeLoop(session, {AGENT: loop}, limits)
    await episode.begin()
    (trajectory,) = await episode.play()
    return trajectory, says


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def told(trajectory: Trajectory) -> list[str]:
    return [message.content.text for message in trajectory.messages if message.role == "tool"]


async def test_a_model_calls_tools_and_answers() -> None:
    played, says = await play(
        call("look") + call("buy", item="apple", count=2), call("buy", item="apple"), "3"
    )
    assert told(played) == ["apples", '{"bought":2}', '{"bought":3}']
    assert (played.reward.value, played.end_reason) == (1.0, ot.EndReason.TERMINATED)
    assert '"name": "buy"' in says.prompts[0]  # the template shows the schemas
    assert says.prompts[0].count("tool_call") == 0
    (segment,) = played.segments
    sampled = [i for i, bit in zip(segment.token_ids, segment.loss_mask, strict=True) if bit]
    assert says.tokenizer.decode(sampled) == "".join(turn.text for turn in played.turns)


async def test_what_a_model_does_wrong_with_tools_is_told_to_it() -> None:
    """B66."""
    played, _ = await play(
        call("buy"), call("buy", item="pear"), call("sell"), '<tool_call>{"a": ', "<tool_call>?", "3"
    )
    assert told(played) == [
        "error: buy: arguments: item missing",
        "error: there is no pear",
        "malformed tool call: there is no tool 'sell'; tools: convert, buy, look",
        *told(played)[3:],
    ]
    assert all(text.startswith("malformed tool call: ") for text in told(played)[2:])
    assert (played.malformed_calls, len(played.turns), played.reward.value) == (3, 6, 0.0)
    assert played.counts


async def test_a_template_without_tools_is_helped_in_words() -> None:
    for template in (CHATML, None):
        played, says = await play(call("buy", item="apple", count=3), "3", template=template)
        assert '"name":"buy"' in says.prompts[0]
        assert "tool_call tags" in says.prompts[0]
        assert played.reward.value == 1.0
        assert len(played.segments) == 1
        assert says.prompts[1].count("tool_call tags") == 1


async def test_limits_of_calls() -> None:
    buy = call("buy", item="apple")
    played, _ = await play(buy, limits=Limits(tool_calls=2))
    assert (played.end_reason, len(played.turns), len(told(played))) == (ot.EndReason.TOOL_LIMIT, 3, 2)
    assert played.end_reason.trainable
    played, _ = await play("<tool_call>?", limits=Limits(parse_errors=2))
    assert (played.end_reason, len(played.turns)) == (ot.EndReason.PARSE_ERROR_LIMIT, 3)
    played, _ = await play("<tool_call>?", limits=Limits(turns=2))
    assert (played.end_reason, len(played.turns)) == (ot.EndReason.TURN_LIMIT, 2)
    played, _ = await play("<tool_call>?")
    assert (played.end_reason, len(played.turns)) == (ot.EndReason.PARSE_ERROR_LIMIT, 11)
    for name in ("tool_calls", "parse_errors", "illegal_actions"):
        with pytest.raises(ot.errors.InvalidArgument) as caught:
            Limits(**{name: -1})
        assert caught.value.field == name


async def test_a_tool_that_breaks_is_a_fault_of_the_environment() -> None:
    class Broken(Shop):
        @ot.tool
        def buy(self, item: str) -> str:
            """Buy something."""
            raise ZeroDivisionError

    assert len(Broken.tools) == 3
    played, _ = await play(call("buy", item="apple"), env=Broken)
    assert played.end_reason is ot.EndReason.ENV_CRASH
    assert played.reward.value is None


async def test_without_tools_everything_is_text() -> None:
    class Echo(ot.Environment):
        def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
            return ot.Observation("Speak.")

        def step(self, action: ot.Action) -> ot.StepResult:
            assert not action.tool_calls
            return ot.StepResult(reward=float(action.text == call("buy")), terminated=True)

    played, _ = await play(call("buy"), env=Echo)
    assert played.reward.value == 1.0


# --- legal actions --------------------------------------------------------------------------------------


class Door(ot.Environment):
    """Open the door: legal actions change."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        self.heard: list[str] = []
        return ot.Observation("A door.", legal_actions=["knock", "wait"])

    def step(self, action: ot.Action) -> ot.StepResult:
        self.heard.append(action.text)
        if len(self.heard) == 2:
            return ot.StepResult(reward=float(self.heard == ["knock", "open"]), terminated=True)
        messages = [{"role": "user", "content": "It moves."}]
        legal = ot.environments.legal_actions([0, 1], ["knock", "open"])
        return ot.StepResult(ot.Observation(messages=messages, legal_actions=legal))


async def test_legal_actions_are_told_and_counted() -> None:
    played, says = await play("knock", "kick", env=Door)
    assert "A door.\n\nAllowed actions: knock, wait" in says.prompts[0]
    assert "It moves.\n\nAllowed actions: open" in says.prompts[1]
    # The environment gets what was said, as it would have without the list.
    assert (played.illegal_actions, len(played.turns), played.reward.value) == (1, 2, 0.0)


async def test_legal_actions_are_enforced_where_asked() -> None:
    played, says = await play("kick", "knock ", "open", env=Door, limits=Limits(illegal_actions=1))
    assert (played.illegal_actions, len(played.turns)) == (1, 3)
    assert "That is not allowed. Allowed actions: knock, wait" in says.prompts[1]
    played, _ = await play("kick", env=Door, limits=Limits(illegal_actions=1))
    assert (played.end_reason, len(played.turns)) == (ot.EndReason.PARSE_ERROR_LIMIT, 2)
    assert played.end_reason.trainable


async def test_an_environment_may_say_itself_what_is_legal() -> None:
    class Quiet(Door):
        tell_legal_actions: ClassVar[bool] = False

    played, says = await play("knock", "kick", env=Quiet)
    assert "Allowed" not in says.prompts[1]
    assert played.illegal_actions == 1


def test_a_mask_names_legal_actions() -> None:
    assert ot.environments.legal_actions(np.array([1, 0, 1])) == ("0", "2")
    assert ot.environments.legal_actions([True, False], ["left", "right"]) == ("left",)
    with pytest.raises(InvalidEpisodeData, match="a mask of 2 actions of which 1"):
        ot.environments.legal_actions([1, 1], ["left"])


async def test_arrays_are_refused_by_name() -> None:
    class Senses(Door):
        def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
            return ot.Observation([ot.environments.Array.of(np.zeros(3))])

    with pytest.raises(ot.errors.UnsupportedOption, match="an array, which no chat template shows"):
        await play("knock", env=Senses)


async def test_rewards_of_all_kinds_are_those_of_their_turns() -> None:
    class Kinds(ot.Environment):
        def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
            self.rewards = iter(
                [
                    ot.Reward(0.5, components={"style": 0.5}),
                    ot.Reward(2.0, kind=ot.environments.RewardKind.CUMULATIVE, components={"style": 1.5}),
                    None,
                    ot.Reward(7.0, kind=ot.environments.RewardKind.TERMINAL),
                ]
            )
            return ot.Observation("Go.")

        def step(self, action: ot.Action) -> ot.StepResult:
            reward = next(self.rewards)
            last = reward is not None and reward.kind is ot.environments.RewardKind.TERMINAL
            return ot.StepResult("Go on.", reward, terminated=last)

    played, _ = await play("x", env=Kinds)
    assert [turn.reward for turn in played.turns] == [0.5, 1.5, None, 5.0]
    assert played.reward.value == 7.0
    assert played.reward.components == {"style": 1.5}
