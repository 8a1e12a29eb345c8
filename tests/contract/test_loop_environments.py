"""Environments that own the model loop: the real gateway records what a real agent says, OpenAI's client and
all, and one loop plays them in this process and on a real env_host.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from services.gateway.tests.conftest import World, gateway_settings, serving
from services.gateway.tests.doubles import abort

from opentinker.environments import (
    Endpoint,
    EndReason,
    Environment,
    EnvironmentDefinitionError,
    LoopEnvironment,
    Reward,
    RewardStatus,
    StepResult,
    describe,
    environment_source,
)
from opentinker.environments.types import Action
from opentinker.errors import InvalidArgument
from opentinker.rollout.limits import Limits
from opentinker.rollout.recorded_agent import check_loop
from opentinker.rollout.trajectory import Trajectory
from opentinker_kit.testing import wait_until
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.reasons import Reason
from tests.stage import Stage, hosting

HERE = Path(__file__)


class Talker(LoopEnvironment):
    """An agent on OpenAI's client, which the task tells what to do."""

    run_timeout_s = 5.0

    def stopped(self, error: Exception) -> float:
        return 0.25

    async def run(self, *, endpoint: Endpoint, seed: int, task: dict[str, Any]) -> float | None:
        self.calls = 0
        messages: list[Any] = [{"role": "user", "content": f"seed {seed}"}]
        async with endpoint.client(max_retries=task.get("retries", 0)) as client:
            for turn in range(task.get("turns", 2)):
                try:
                    reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
                except openai.APIStatusError as error:
                    if task.get("wraps"):
                        raise RuntimeError("the agent gave up") from error
                    if task.get("swallows"):
                        continue
                    raise
                self.calls += 1
                if task.get("rewrites") and turn == 0:
                    messages = [{"role": "user", "content": "In short: go on."}]
                else:
                    messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "More."}]
        if task.get("dies"):
            os._exit(3)
        if task.get("raises"):
            raise KeyError("the agent's own fault")
        if task.get("hangs"):
            await asyncio.sleep(60)
        return task.get("reward", 1.0)

    def metrics(self) -> dict[str, float]:
        return {"calls": self.calls}


class Blocking(LoopEnvironment):
    """The same with plain methods: it may block."""

    def run(self, *, endpoint: Endpoint, seed: int, task: dict[str, Any]) -> Reward:
        with endpoint.blocking_client(max_retries=0) as client:
            told = {"role": "user", "content": "go"}
            reply = client.completions.create(model=endpoint.model, prompt=told["content"])
        return Reward(0.5, components={"long": float(len(reply.choices[0].text) > 3)})


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with serving(gateway_settings(tmp_path)) as served:
        yield served


@pytest.fixture(scope="module")
def host_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = [str(HERE.parent), str(HERE.parent.parent.parent)]
    names = {"talker": "Talker", "blocking": "Blocking"}
    entries = {name: {"target": f"{HERE.stem}:{target}", "path": path} for name, target in names.items()}
    with hosting(tmp_path_factory.mktemp("env_host"), entries) as port:
        yield port


@pytest.fixture(params=["in this process", pytest.param("hosted", marks=pytest.mark.slow)])
async def stage(request: pytest.FixtureRequest, world: World) -> AsyncIterator[Stage]:
    if request.param == "hosted":
        async with open_channel(f"127.0.0.1:{request.getfixturevalue('host_port')}") as channel:
            source = await environment_source("talker", channel=channel)
            yield Stage(world, source)
            await source.close()
    else:
        yield Stage(world, await environment_source(Talker))


def sampled(world: World, trajectory: Trajectory) -> list[str]:
    """The text of the trained tokens of each segment."""
    return [
        world.inference.tokenizer.decode(
            [
                token_id
                for token_id, bit in zip(segment.token_ids, segment.loss_mask, strict=True)
                if bit and token_id not in world.inference.tokenizer.eos_ids
            ]
        )
        for segment in trajectory.segments
    ]


async def test_what_an_agent_was_told_is_what_is_trained(stage: Stage) -> None:
    stage.world.inference.script = ["one", "two"]
    trajectory = await stage.play(temperature=0.5, max_tokens=9)
    assert (trajectory.end_reason, trajectory.reward.value) == (EndReason.TERMINATED, 1.0)
    assert sampled(stage.world, trajectory) == ["onetwo"]
    assert [turn.text for turn in trajectory.turns] == ["one", "two"]
    assert [turn.reward for turn in trajectory.turns] == [None, 1.0]
    assert {version for segment in trajectory.segments for *_, version in segment.spans} == {3}
    assert (trajectory.temperature, trajectory.metrics) == (0.5, {"calls": 2.0})
    assert {each.params.max_tokens for each in stage.world.inference.requests} == {9}
    assert (trajectory.group, trajectory.member, trajectory.policy) == ("g/1", 0, "policy")


async def test_a_history_that_the_agent_rewrote_begins_a_segment(stage: Stage) -> None:
    stage.world.inference.script = ["one", "two", "three"]
    trajectory = await stage.play({"turns": 3, "rewrites": True})
    assert sampled(stage.world, trajectory) == ["one", "twothree"]
    assert trajectory.sampled_tokens == sum(sum(each.loss_mask) for each in trajectory.segments)


async def test_b75_a_call_that_was_made_again_is_one_turn(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker_gateway.adapters.served.PAUSE_S", 0.0)
    failed = []

    async def fail_once(request: Any, context: Any) -> None:
        if not failed:
            failed.append(1)
            await abort(context, Reason.INTERNAL, "broken")

    stage.world.inference.before = fail_once
    trajectory = await stage.play({"turns": 2, "retries": 1})
    assert failed
    assert (len(trajectory.turns), len(trajectory.segments)) == (2, 1)
    assert (trajectory.end_reason, trajectory.reward.value) == (EndReason.TERMINATED, 1.0)


@pytest.mark.parametrize("how", ["swallows", "wraps"])
async def test_b74_an_agent_that_goes_on_without_an_answer_is_not_trained(
    stage: Stage, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker_gateway.adapters.served.PAUSE_S", 0.0)
    calls = []

    async def fail_the_second(request: Any, context: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            await abort(context, Reason.INTERNAL, "broken")

    stage.world.inference.before = fail_the_second
    trajectory = await stage.play({"turns": 2, how: True, "reward": 0.0})
    assert trajectory.end_reason is EndReason.CANCELLED
    assert trajectory.reward.value is None
    assert "INTERNAL" in trajectory.error
    assert not trajectory.counts


async def test_what_the_agent_does_wrong_is_not_the_infrastructures(stage: Stage) -> None:
    trajectory = await stage.play({"raises": True})
    assert trajectory.end_reason is EndReason.ENV_CRASH
    assert "the agent's own fault" in trajectory.error
    assert (trajectory.reward.value, len(trajectory.turns)) == (None, 2)


async def test_a_run_that_never_ends_meets_its_deadline(world: World) -> None:
    class Slow(Talker):
        run_timeout_s = 0.5

    trajectory = await Stage(world, await environment_source(Slow)).play({"hangs": True})
    assert trajectory.end_reason is EndReason.STEP_TIMEOUT
    assert (trajectory.reward.status, trajectory.counts) == (RewardStatus.UNSCORED, False)
    played = await Stage(world, await environment_source(Slow)).play(
        {"hangs": True}, Limits(wall_clock_s=0.2)
    )
    assert played.end_reason is EndReason.EPISODE_TIMEOUT


async def test_an_episode_that_is_cut_says_nothing_more(world: World) -> None:
    """A plain run goes on in its thread; its model does not answer it any more."""
    asked, go_on, ended = threading.Event(), threading.Event(), []

    class Endless(LoopEnvironment):
        def run(self, *, endpoint: Endpoint, seed: int, task: dict[str, Any]) -> float:
            with endpoint.blocking_client(max_retries=0) as client:
                client.completions.create(model="policy", prompt="go")
                asked.set()
                go_on.wait(20)
                try:
                    client.completions.create(model="policy", prompt="on")
                except openai.APIStatusError as error:
                    ended.append(error.status_code)
            return 1.0

    stage = Stage(world, await environment_source(Endless))
    loop = await stage.loop({}, Limits())
    await loop.begin()
    playing = asyncio.create_task(loop.play())
    assert await asyncio.to_thread(asked.wait, 20)
    loop.cut()
    (trajectory,) = await playing
    assert trajectory.end_reason is EndReason.EPISODE_TIMEOUT
    go_on.set()
    await wait_until(lambda: bool(ended), 20, what="the agent is refused")
    assert ended == [401]


@pytest.mark.parametrize("wraps", [False, True])
async def test_limits_are_the_models_own_end(stage: Stage, wraps: bool) -> None:
    trajectory = await stage.play({"turns": 5, "wraps": wraps}, Limits(turns=2))
    assert trajectory.end_reason is EndReason.TURN_LIMIT
    assert (trajectory.reward.value, len(trajectory.turns)) == (0.25, 2)
    assert trajectory.counts
    trajectory = await stage.play({"turns": 50, "wraps": wraps}, Limits(tokens_per_episode=60))
    assert trajectory.end_reason is EndReason.TOKEN_LIMIT
    asked = [each.params.max_tokens for each in stage.world.inference.requests[-len(trajectory.turns) :]]
    assert [turn.prompt_tokens + most for turn, most in zip(trajectory.turns, asked, strict=True)] == [
        60
    ] * len(asked)


async def test_a_limit_that_the_agent_lives_with_does_not_end_it(stage: Stage) -> None:
    trajectory = await stage.play({"turns": 3, "swallows": True}, Limits(turns=2))
    assert (trajectory.end_reason, trajectory.reward.value) == (EndReason.TERMINATED, 1.0)


async def test_rewards_that_are_none_stay_none(stage: Stage) -> None:
    assert (await stage.play({"reward": None})).reward.status is RewardStatus.UNSCORED
    silent = await stage.play({"turns": 0})
    assert (silent.reward.value, silent.segments) == (None, ())


async def test_a_gateway_that_forgot_the_episode_lost_it(world: World) -> None:
    class Forgotten(Talker):
        async def run(self, *, endpoint: Endpoint, seed: int, task: dict[str, Any]) -> float | None:
            reward = await super().run(endpoint=endpoint, seed=seed, task=task)
            assert await stage.at_gateway("DELETE") == 204
            return reward

    stage = Stage(world, await environment_source(Forgotten))
    trajectory = await stage.play()
    assert (trajectory.end_reason, trajectory.reward.value) == (EndReason.SANDBOX_LOST, None)


@pytest.mark.slow
async def test_b75_a_run_whose_worker_died_is_not_played_again(world: World, host_port: int) -> None:
    async with open_channel(f"127.0.0.1:{host_port}") as channel:
        source = await environment_source("talker", channel=channel)
        trajectory = await Stage(world, source).play({"turns": 1, "dies": True})
        assert (trajectory.end_reason, trajectory.reward.value) == (EndReason.SANDBOX_LOST, None)
        assert len(world.inference.requests) == 1
        await source.close()


@pytest.mark.slow
async def test_plain_runs_may_block(world: World, host_port: int) -> None:
    world.inference.script = ["hello"]
    async with open_channel(f"127.0.0.1:{host_port}") as channel:
        hosted = await environment_source("blocking", channel=channel)
        assert hosted.info.run_timeout_s == 600.0
        for source in (await environment_source(Blocking), hosted):
            trajectory = await Stage(world, source).play()
            assert trajectory.reward.value == 0.5
            assert trajectory.reward.components == {"long": 1.0}
        await hosted.close()


async def test_only_an_endpoint_is_a_move() -> None:
    (session,) = await (await environment_source(Talker)).open_group(task={}, seed=0, size=1)
    await session.begin()
    with pytest.raises(Exception, match="the JSON of an endpoint"):
        await session.step(Action("hello"), 1)
    assert "secret" not in repr(Endpoint("http://x", "secret"))


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(EnvironmentDefinitionError, match="does not define run"):
        describe(type("Nothing", (LoopEnvironment,), {}))
    for wrong in (
        {"run_timeout_s": 0.0},
        {"run_timeout_s": 1e9},
        {"agents": ("a", "b")},
        {"deterministic": True},
    ):
        with pytest.raises(EnvironmentDefinitionError, match=next(iter(wrong))):
            type("Wrong", (Talker,), wrong)
    info = describe(Talker)
    for limits in (Limits(tool_calls=1), Limits(parse_errors=3), Limits(illegal_actions=0)):
        with pytest.raises(InvalidArgument, match="owns the model loop"):
            check_loop(info, limits, "")
    with pytest.raises(InvalidArgument, match="chat template"):
        check_loop(info, Limits(), "chatml")
    check_loop(info, Limits(turns=3), "chat-template")

    class Plain(Environment):
        def reset(self, *, seed: int, task: dict[str, Any]) -> Any: ...
        def step(self, action: Any, /) -> StepResult: ...

    check_loop(describe(Plain), Limits(tool_calls=1), "chatml")
