"""`ot.play`: the class that `fit` takes, played by what is served behind OpenAI's API. A real gateway."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
from services.gateway.tests.doubles import KEY, Inference, Scheduler, serve_doubles
from services.gateway.tests.tokenizers import TAGGED, files

import opentinker as ot
from opentinker.environments.builtin import GuessNumber
from opentinker_gateway.bootstrap import build
from opentinker_gateway.settings import GatewaySettings
from opentinker_kit.files import write_atomic
from opentinkerapi.runtime.errors import InvalidArgument, UnsupportedOption
from tests.contract.bad_worlds import MISDEEDS, Bad, Endless


class Sum(ot.ToolEnvironment):
    """Add two numbers with a tool."""

    splits: ClassVar[tuple[str, ...]] = ("test",)

    def tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"a": 1, "b": 2}, {"a": 3, "b": 4}]

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        self.task = task
        return ot.Observation(f"{task['a']} + {task['b']}?")

    @ot.tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    def answered(self, text: str) -> ot.StepResult:
        return ot.StepResult(reward=float(text == str(self.task["a"] + self.task["b"])), terminated=True)

    def metrics(self) -> dict[str, float]:
        return {"first": self.task["a"]}


@dataclass
class Served:
    """A gateway and the model behind it."""

    url: str
    inference: Inference
    asked: dict[str, Any]

    async def play(self, env: Any, *script: str, **options: Any) -> list[ot.PlayedEpisode]:
        self.inference.script = list(script)
        self.inference.requests.clear()
        return await ot.play_async(env, **self.asked, **{"concurrency": 1, **options})


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    for name, secret in (("bootstrap", KEY), ("service", "service-key")):
        write_atomic(tmp_path / f"{name}.key", secret, mode=0o600)
    inference = Inference(files(TAGGED))
    server, address = await serve_doubles(Scheduler(), inference)
    gateway = build(
        GatewaySettings(
            scheduler_address=address,
            bootstrap_key_file=tmp_path / "bootstrap.key",
            service_key_file=tmp_path / "service.key",
            state_dir=tmp_path,
            drain_s=1.0,
        )
    )
    url = f"http://127.0.0.1:{await gateway.start()}/v1"
    yield Served(url, inference, {"base_url": url, "api_key": KEY, "model": "mine"})
    gateway.server.request_drain()
    await gateway.server.wait()
    await gateway.stop()
    await server.stop(grace=0)


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


async def test_tools_tasks_and_rewards(served: Served) -> None:
    sampling = ot.SamplingParams(max_tokens=50, temperature=0.5, top_k=7, stop=("!",))
    script = (call('{"a": 1, "b": 2}'), "3", call('{"a": 3, "b": "x"}'), "8")
    right, wrong = await served.play(Sum, *script, sampling=sampling)
    assert (right.reward.value, right.end_reason, right.metrics) == (
        1.0,
        ot.EndReason.TERMINATED,
        {"first": 1},
    )
    assert [message.role for message in right.messages] == ["user", "assistant", "tool", "assistant"]
    assert right.messages[2].content.text == "3"
    assert right.messages[2].tool_call_id == right.messages[1].tool_calls[0].id
    # Arguments that make no sense are an observation for the model.
    assert "must be" in wrong.messages[2].content.text or "integer" in wrong.messages[2].content.text
    assert (wrong.reward.value, wrong.task) == (0.0, {"a": 3, "b": 4})
    first = served.inference.requests[0]
    assert (first.params.max_tokens, first.params.temperature, first.params.top_k) == (50, 0.5, 7)
    assert list(first.params.stop) == ["!"]
    assert "Tools:" in served.inference.prompt_text(0)
    assert len({request.params.seed for request in served.inference.requests}) == 4


async def test_the_same_seed_is_the_same_episode_again(served: Served) -> None:
    again = [await served.play(GuessNumber, "7", episodes=4, seed=3, max_turns=2) for _ in range(2)]
    assert again[0] == again[1]
    other = await served.play(GuessNumber, "7", episodes=4, seed=4, max_turns=2)
    assert [each.seed for each in other] != [each.seed for each in again[0]]


async def test_what_goes_wrong_is_no_reward(served: Served) -> None:
    names = [name for name in MISDEEDS if name != "is interrupted"]
    for name in names:
        (played,) = await served.play(Bad, "on", name, episodes=1)
        assert (played.end_reason, played.reward.value, played.counts) == (
            ot.EndReason.ENV_CRASH,
            None,
            False,
        )
        assert played.error
    (played,) = await served.play(Endless, "more", episodes=1, max_turns=3)
    assert (played.end_reason, played.reward.value, played.counts) == (ot.EndReason.TURN_LIMIT, None, False)
    served.inference.context_tokens = 300
    (played,) = await served.play(Endless, "more", episodes=1)
    assert played.end_reason is ot.EndReason.TOKEN_LIMIT
    (played,) = await served.play(Endless, "more", episodes=1, wall_clock_s=0.001)
    assert played.end_reason is ot.EndReason.EPISODE_TIMEOUT


async def test_a_model_that_is_not_there_is_not_played_with(served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        await ot.play_async(Sum, **{**served.asked, "model": "nobody"})
    with pytest.raises(openai.AuthenticationError):
        await ot.play_async(Sum, **{**served.asked, "api_key": "wrong"})


class Duel(Endless):
    """For two."""

    agents: ClassVar[tuple[str, ...]] = ("white", "black")


@pytest.mark.parametrize(
    ("field", "env", "options"),
    [
        ("episodes", Sum, {"episodes": 0}),
        ("concurrency", Sum, {"concurrency": 0}),
        ("max_turns", Sum, {"max_turns": 0}),
        ("split", type("Empty", (Sum,), {"tasks": lambda self, split: []}), {}),
        ("env", Duel, {}),
        ("env_options", Sum, {"env_options": {"colour": 1}}),
        ("sampling.prompt_logprobs", Sum, {"sampling": ot.SamplingParams(prompt_logprobs=True)}),
    ],
)
async def test_what_cannot_be_played_is_refused_by_name(
    field: str, env: Any, options: dict[str, Any]
) -> None:
    with pytest.raises((InvalidArgument, UnsupportedOption)) as raised:
        await ot.play_async(env, base_url="http://127.0.0.1:9/v1", model="mine", **options)
    assert raised.value.field == field


async def test_it_may_be_called_beside_an_event_loop(served: Served) -> None:
    """As in a notebook; another thread stands for its cell, since the gateway runs on this loop."""
    served.inference.script = ["3"]
    played = await asyncio.to_thread(ot.play, Sum, **served.asked, episodes=1)
    assert [each.reward.value for each in played] == [1.0]
    with pytest.raises(InvalidArgument, match="play_async"):
        ot.play("guess_number", base_url=served.url, model="mine")
