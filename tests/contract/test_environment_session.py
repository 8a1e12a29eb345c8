"""The session port, one class of tests run on both implementations: in this process, and on a real env_host.

What a loop sees of an episode must not depend on where it is played.
"""

import asyncio
import json
import math
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import grpc.aio
import numpy as np
import pytest

from opentinker.environments import (
    Action,
    Array,
    EndReason,
    Environment,
    EnvironmentSession,
    EnvironmentSource,
    Image,
    InvalidEpisodeData,
    JointStep,
    Json,
    Message,
    Metric,
    Observation,
    Reward,
    RewardStatus,
    StepResult,
    ToolCall,
    end_reason_of,
    environment_source,
)
from opentinker.environments.builtin import Arithmetic, GuessNumber
from opentinker_env_host.settings import EnvHostSettings
from opentinker_kit.testing.waiting import wait_until_sync
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import (
    EnvironmentCrashed,
    EpisodeNotFound,
    FailedPrecondition,
    InvalidArgument,
    SeqReused,
    StepTimeout,
)

HERE = Path(__file__)


class Everything(Environment):
    """Shows every kind of content, reward and end; the action says which."""

    def __init__(self, size: int = 3) -> None:
        if size < 1:
            raise ValueError(f"size must be positive, is {size}")
        self._size = size

    def tasks(self, split: str) -> list[dict[str, Any]] | None:
        if split == "test":
            return None
        return [{"number": number, "pair": (1, 2)} for number in range(self._size)]

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        text = f"seed {seed} task {json.dumps(task, sort_keys=True)} size {self._size}"
        return Observation(messages=[{"role": "system", "content": text}, Message("user", "go")])

    def step(self, action: Action) -> StepResult:
        match action.text:
            case "parts":
                array = np.arange(6, dtype=np.float32).reshape(2, 3)
                parts = ["ä\u2028", Json.of({"a": [1, None]}), Image(b"\x00\xff" * 50), Array.of(array)]
                return StepResult(Observation(parts, info={"pair": (1, 2)}), info={3: "three"})
            case "tools":
                call = ToolCall("search", '{"q":', "call-1")
                return StepResult(
                    Observation(
                        messages=[
                            Message("assistant", "", [call]),
                            Message("tool", "malformed", tool_call_id="call-1", name="search"),
                        ],
                        legal_actions=["a", "b"],
                    )
                )
            case "reward":
                return StepResult("x", Reward(0.25, components={"style": 0.25}))
            case "grader":
                return StepResult("x", Reward.failed(RewardStatus.GRADER_ERROR))
            case "calls":
                return StepResult(" ".join(f"{call.name}({call.arguments})" for call in action.tool_calls))
            case "nan":
                return StepResult("x", math.nan)
            case "raise":
                raise KeyError("lost")
            case "exit":
                raise SystemExit(3)
            case "own timeout":
                raise TimeoutError("a tool of mine")
            case "wrong":
                return "not a result"  # type: ignore[return-value]
            case "hang":
                while True:
                    pass
            case "cut":
                return StepResult(truncated=True, reward=-1)
            case "end":
                return StepResult("the end", 1, terminated=True)
        return StepResult("?")

    def metrics(self) -> dict[str, float]:
        return {"size": self._size}


class Bids(Environment):
    """Two bid at once until one says 0 and is out; then the other alone, once."""

    agents: ClassVar[tuple[str, ...]] = ("east", "west")

    def reset(self, *, seed: int, task: dict[str, Any]) -> dict[str, Observation]:
        self.alone = ""
        return {name: Observation(f"{name}, seed {seed}", info={"of": name}) for name in self.agents}

    def step(self, actions: dict[str, Action]) -> JointStep:
        rewards: dict[str, float] = {name: int(action.text) for name, action in actions.items()}
        out = [name for name, bid in rewards.items() if not bid]
        if self.alone or len(out) == 2:
            return JointStep({"west": Observation("sold")}, rewards, terminated=True, info={"sold": True})
        left = {name: Observation(f"{name} again") for name in rewards if name not in out}
        self.alone = next(iter(left)) if out else ""
        return JointStep(left, rewards, ended=dict.fromkeys(out, EndReason.TRUNCATED))

    def finalize(self) -> dict[str, float | None]:
        return {"east": 10.0, "west": None}

    def metrics(self) -> dict[str, float | Metric]:
        return {"rate": Metric(0.5, weight=4), "most": Metric(5, kind="max"), "plain": 2}


class SessionContract(ABC):
    """What every EnvironmentSession does."""

    @abstractmethod
    async def source(self, where: Any, env: type[Environment], **options: Any) -> EnvironmentSource:
        """A source of episodes of `env`."""

    @pytest.fixture
    async def where(self) -> Any:
        return None

    async def begun(self, where: Any, *, timeout_s: float = 10.0) -> EnvironmentSession:
        source = await self.source(where, Everything, step_timeout_s=timeout_s)
        (session,) = await source.open_group(task={"b": 2, "a": (1,)}, seed=2**64 - 1, size=1)
        await session.begin()
        return session

    async def test_begin_gives_the_first_observation_again_and_again(self, where: Any) -> None:
        source = await self.source(where, Everything, options={"size": 7})
        (session,) = await source.open_group(task={"b": 2, "a": (1,)}, seed=2**64 - 1, size=1)
        first = await session.begin()
        expected = 'seed 18446744073709551615 task {"a": [1], "b": 2} size 7'
        assert first == Observation(messages=[Message("system", expected), Message("user", "go")])
        assert await session.begin() == first
        await source.close()

    async def test_every_kind_of_content_arrives_as_it_was(self, where: Any) -> None:
        session = await self.begun(where)
        result = await session.step(Action("parts"), 1)
        assert result.reward == Reward.unscored()
        assert result.info == {"3": "three"}
        assert result.observation is not None
        assert result.observation.info == {"pair": [1, 2]}
        assert result.observation.content is not None
        text, value, image, array = result.observation.content.parts
        assert text.text == "ä\u2028"  # type: ignore[union-attr]
        assert value.value == {"a": [1, None]}  # type: ignore[union-attr]
        assert image == Image(b"\x00\xff" * 50)
        assert isinstance(array, Array)
        assert np.array_equal(array.numpy(), np.arange(6, dtype=np.float32).reshape(2, 3))
        result = await session.step(Action("tools"), 2)
        assert result.observation is not None
        assert result.observation.messages[0].tool_calls == (ToolCall("search", '{"q":', "call-1"),)
        assert result.observation.messages[1].name == "search"
        assert result.observation.legal_actions == ("a", "b")
        result = await session.step(Action("calls", (ToolCall("f", "{}"), ToolCall("g", "not json"))), 3)
        assert result.observation is not None
        assert result.observation.text == "f({}) g(not json)"
        await session.close()

    async def test_rewards_add_up_and_missing_ones_stay_missing(self, where: Any) -> None:
        session = await self.begun(where)
        assert (await session.step(Action("?"), 1)).reward.value is None
        assert (await session.step(Action("reward"), 2)).reward == Reward(0.25, components={"style": 0.25})
        end = await session.step(Action("end"), 3)
        assert (end.terminated, end.done, end.observation) == (True, True, Observation("the end"))
        result = await session.finalize()
        assert result == await session.finalize()
        assert (result.reward.value, result.end_reason) == (1.25, EndReason.TERMINATED)
        assert result.metrics == {"size": 3.0}
        with pytest.raises(FailedPrecondition):
            await session.step(Action("?"), 4)
        await session.close()

    async def test_an_episode_may_be_finalized_before_its_end(self, where: Any) -> None:
        session = await self.begun(where)
        await session.step(Action("?"), 1)
        result = await session.finalize()
        assert (result.reward.status, result.end_reason) == (RewardStatus.UNSCORED, None)
        with pytest.raises(FailedPrecondition):
            await session.step(Action("?"), 2)
        await session.close()

    async def test_failed_grading_is_a_status(self, where: Any) -> None:
        session = await self.begun(where)
        assert (await session.step(Action("grader"), 1)).reward.status is RewardStatus.GRADER_ERROR
        assert (await session.step(Action("cut"), 2)).truncated
        result = await session.finalize()
        assert (result.reward.status, result.reward.value) == (RewardStatus.GRADER_ERROR, None)
        assert result.end_reason is EndReason.TRUNCATED

    async def test_seq_is_plus_one_and_the_last_one_again_does_not_step(self, where: Any) -> None:
        session = await self.begun(where)
        answer = await session.step(Action("reward"), 1)
        assert await session.step(Action("reward"), 1) == answer
        with pytest.raises(SeqReused):
            await session.step(Action("end"), 1)
        for wrong in (3, 9):
            with pytest.raises(FailedPrecondition) as raised:
                await session.step(Action("end"), wrong)
            assert raised.value.reason == "STEP_OUT_OF_ORDER"
        await session.step(Action("end"), 2)
        assert (await session.finalize()).reward.value == 1.25

    async def test_nothing_comes_before_begin(self, where: Any) -> None:
        source = await self.source(where, Everything)
        (session,) = await source.open_group(task={}, seed=0, size=1)
        for call in (session.step(Action("?"), 1), session.finalize()):
            with pytest.raises(FailedPrecondition, match=r"has not begun"):
                await call

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("raise", "Everything.step raised KeyError"),
            ("exit", "SystemExit: 3"),
            ("own timeout", "a tool of mine"),
            ("nan", "rewards must be finite"),
            ("wrong", "must return a StepResult, not str"),
        ],
    )
    async def test_what_the_environment_does_wrong_ends_the_episode(
        self, where: Any, text: str, message: str
    ) -> None:
        session = await self.begun(where)
        for call in (session.step(Action(text), 1), session.step(Action("?"), 2), session.finalize()):
            with pytest.raises(EnvironmentCrashed, match=message) as raised:
                await call
            assert end_reason_of(raised.value) is EndReason.ENV_CRASH
        assert not EndReason.ENV_CRASH.trainable
        await session.close()

    async def test_a_step_without_end_is_a_timeout(self, where: Any) -> None:
        source = await self.source(where, Everything, step_timeout_s=1.0)
        hung, other = await source.open_group(task={}, seed=0, size=2)
        await asyncio.gather(hung.begin(), other.begin())
        with pytest.raises(StepTimeout) as raised:
            await hung.step(Action("hang"), 1)
        assert end_reason_of(raised.value) is EndReason.STEP_TIMEOUT
        with pytest.raises(StepTimeout):
            await hung.finalize()
        assert (await other.step(Action("end"), 1)).terminated
        await source.close()

    async def test_a_closed_episode_is_gone(self, where: Any) -> None:
        session = await self.begun(where)
        await session.close()
        await session.close()
        with pytest.raises(EpisodeNotFound):
            await session.step(Action("?"), 1)

    async def test_several_agents_move_and_are_rewarded_by_name(self, where: Any) -> None:
        source = await self.source(where, Bids)
        assert source.info.agents == ("east", "west")
        (session,) = await source.open_group(task={}, seed=3, size=1)
        first = await session.begin_all()
        assert first == {name: Observation(f"{name}, seed 3", info={"of": name}) for name in ("east", "west")}
        assert await session.begin_all() == first
        with pytest.raises(InvalidEpisodeData, match="several agents: east, west"):
            await session.begin()
        for wrong in (
            {"east": Action("1")},
            {"east": Action("1"), "west": Action("1"), "agent": Action("1")},
        ):
            with pytest.raises(InvalidArgument, match=r"moves of \['east', 'west'\] are pending") as raised:
                await session.step_all(wrong, 1)
            assert raised.value.field == "actions"
        moves = {"east": Action("2"), "west": Action("0")}
        step = await session.step_all(moves, 1)
        assert step.observations == {"east": Observation("east again")}
        assert step.rewards == {"east": Reward(2.0), "west": Reward(0.0)}
        assert (step.ended, step.done) == ({"west": EndReason.TRUNCATED}, False)
        assert await session.step_all(moves, 1) == step
        with pytest.raises(SeqReused):
            await session.step_all({"east": Action("2"), "west": Action("1")}, 1)
        with pytest.raises(InvalidArgument, match=r"moves of \['east'\] are pending"):
            await session.step_all(moves, 2)
        end = await session.step_all({"east": Action("5")}, 2)
        assert (end.terminated, end.info) == (True, {"sold": True})
        assert end.observations == {"west": Observation("sold")}
        result = await session.finalize_all()
        assert {name: reward.value for name, reward in result.rewards.items()} == {"east": 10.0, "west": 0.0}
        assert result.end_reason is EndReason.TERMINATED
        assert result.metrics == {"rate": Metric(0.5, 4.0), "most": Metric(5.0, kind="max"), "plain": 2.0}
        await source.close()

    async def test_tasks_of_a_split(self, where: Any) -> None:
        source = await self.source(where, Everything, options={"size": 3})
        tasks = await source.tasks("train")
        assert tasks is not None
        assert [task["number"] for task in tasks] == [0, 1, 2]
        assert source.info.splits == ("train", "test")
        assert await source.tasks("test") is None
        assert await source.tasks("validation") is None
        assert source.info.description.startswith("Shows every kind")
        await source.close()

    async def test_arithmetic_keeps_its_test_problems_out_of_training(self, where: Any) -> None:
        source = await self.source(where, Arithmetic)
        assert await source.tasks("train") is None
        tasks = await source.tasks("test")
        assert tasks is not None
        assert len(tasks) == 200
        assert tasks[0] == Arithmetic().tasks("test")[0]  # type: ignore[index]
        (session,) = await source.open_group(task=tasks[0], seed=1, size=1)
        await session.begin()
        right = tasks[0]["a"] + tasks[0]["b"] if tasks[0]["op"] == "+" else tasks[0]["a"] - tasks[0]["b"]
        assert (await session.step(Action(f"It is {right}."), 1)).reward.value == 1.0
        await source.close()


class TestLocalSession(SessionContract):
    async def source(self, where: Any, env: type[Environment], **options: Any) -> EnvironmentSource:
        return await environment_source(env, options.pop("options", None), **options)

    async def test_a_step_without_end_is_a_timeout(self, where: Any) -> None:
        # An endless loop would stay in this process for the rest of the tests.
        class Slow(Everything):
            def step(self, action: Action) -> StepResult:
                import time

                time.sleep(2.0 if action.text == "hang briefly" else 0.0)
                return super().step(action)

        source = await environment_source(Slow, step_timeout_s=0.3)
        hung, other = await source.open_group(task={}, seed=0, size=2)
        await asyncio.gather(hung.begin(), other.begin())
        with pytest.raises(StepTimeout) as raised:
            await hung.step(Action("hang briefly"), 1)
        assert end_reason_of(raised.value) is EndReason.STEP_TIMEOUT
        with pytest.raises(StepTimeout):
            await hung.finalize()
        assert (await other.step(Action("end"), 1)).terminated


@contextmanager
def running_host(folder: Path, port: int = 0) -> Iterator[int]:
    """A real env_host in a process of its own; its port."""
    folder.mkdir(exist_ok=True)
    shipped = {name: entry.model_dump(mode="json") for name, entry in EnvHostSettings().environments.items()}
    mine = {"target": f"{HERE.stem}:Everything", "path": [str(HERE.parent)]}
    bids = {**mine, "target": f"{HERE.stem}:Bids"}
    settings = {
        "environments": {**shipped, "everything": mine, "bids": bids},
        "state_dir": str(folder / "state"),
        "ready_file": str(folder / "ready.json"),
        "listen_port": port,
        "drain_s": 0.5,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "opentinker_env_host", "--settings", str(folder / "settings.json")]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            ready = folder / "ready.json"
            wait_until_sync(ready.exists, 60, what=f"env_host is ready; see {folder / 'log'}")
            yield json.loads(ready.read_text())["port"]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def host_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running_host(tmp_path_factory.mktemp("env_host")) as port:
        yield port


class TestHostedSession(SessionContract):
    NAMES: ClassVar[dict[type[Environment], str]] = {
        Everything: "everything",
        Bids: "bids",
        Arithmetic: "arithmetic",
        GuessNumber: "guess_number",
    }

    @pytest.fixture
    async def where(self, host_port: int) -> AsyncIterator[grpc.aio.Channel]:
        async with open_channel(f"127.0.0.1:{host_port}") as channel:
            yield channel

    async def source(self, where: Any, env: type[Environment], **options: Any) -> EnvironmentSource:
        given = options.pop("options", None)
        return await environment_source(f"hosted:{self.NAMES[env]}", given, channel=where, **options)

    async def test_unknown_names_and_options_are_refused(self, where: Any) -> None:
        with pytest.raises(InvalidArgument, match="known: arithmetic, bids, everything, guess_number"):
            await environment_source("chess", channel=where)
        with pytest.raises(InvalidArgument, match="no env_host"):
            await environment_source("guess_number")
        source = await environment_source("everything", {"size": 0}, channel=where)
        with pytest.raises(InvalidArgument, match="size must be positive"):
            await source.open_group(task={}, seed=0, size=1)
        source = await environment_source("everything", {"colour": 0}, channel=where)
        with pytest.raises(InvalidArgument, match="colour"):
            await source.open_group(task={}, seed=0, size=1)

    @pytest.mark.parametrize("env", [GuessNumber, Arithmetic])
    async def test_hosted_and_in_process_episodes_are_the_same(
        self, where: Any, env: type[Environment]
    ) -> None:
        options = {"max" if env is Arithmetic else "high": 30}
        hosted = await environment_source(self.NAMES[env], options, channel=where)
        local = await environment_source(env, options)
        for seed in range(12):
            (one,) = await hosted.open_group(task={}, seed=seed, size=1)
            (other,) = await local.open_group(task={}, seed=seed, size=1)
            assert await one.begin() == await other.begin()
            for seq, text in enumerate(["15", "none", "I say 7 or 8", "23", "-3", "12", "20"], start=1):
                mine, theirs = await one.step(Action(text), seq), await other.step(Action(text), seq)
                assert mine == theirs
                if mine.done:
                    break
            assert await one.finalize() == await other.finalize()
        await hosted.close()


async def test_an_episode_outlives_its_host(tmp_path: Path) -> None:
    """A host that was restarted knows no episode; the session plays it there again and goes on."""
    with running_host(tmp_path / "first") as port:
        channel = open_channel(f"127.0.0.1:{port}")
        source = await environment_source("guess_number", {"high": 1000}, channel=channel)
        guesses, session = await source.open_group(task={}, seed=5, size=2)
        expected = [await guesses.begin()]
        for seq in range(1, 6):
            result = await guesses.step(Action(str(100 * seq)), seq)
            assert result.observation is not None
            expected.append(result.observation)
        assert await session.begin() == expected[0]
        await session.step(Action("100"), 1)
        await session.step(Action("200"), 2)
        old = session.episode
    waiting = asyncio.create_task(session.step(Action("300"), 3))
    await asyncio.sleep(0.2)
    with running_host(tmp_path / "second", port):
        assert (await waiting).observation == expected[3]
        assert session.episode != old
        assert session.replays == 1
        assert (await session.step(Action("400"), 4)).observation == expected[4]
        await source.close()
    await channel.close()
