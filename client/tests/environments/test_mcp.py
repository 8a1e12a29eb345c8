"""MCP servers as tools: the real library on both ends, over pipes and over HTTP."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from opentinker.environments import (
    Action,
    EndReason,
    Environment,
    EnvironmentDefinitionError,
    EnvironmentSession,
    Observation,
    RewardStatus,
    ToolCall,
    describe,
    end_reason_of,
    environment_source,
)
from opentinker.environments.adapters.mcp import McpServer, McpSession, mcp_environment
from opentinker.environments.content import Image
from opentinker.environments.runner import Runner
from opentinker.errors import EnvironmentCrashed, StepTimeout
from opentinker_kit.testing import wait_until

SERVER = Path(__file__).with_name("mcp_server.py")
TASKS = {"train": [{"prompt": "What is 2 + 3?", "answer": "5"}], "test": [{"prompt": "?", "answer": ""}]}


async def graded(answer: str, task: dict[str, Any], session: McpSession) -> float:
    """Right, and noted."""
    kept = (await session.call("notes", {})).text
    return 0.5 * (answer == task["answer"]) + 0.5 * ("five" in kept)


@pytest.fixture(scope="module")
def program() -> McpServer:
    return McpServer.program(sys.executable, str(SERVER), env={"GREETING": "hello"})


@pytest.fixture(scope="module")
def env(program: McpServer) -> type[Environment]:
    os.environ["SECRET"] = "of the client"
    return mcp_environment(program, TASKS, reward=graded, name="notes")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_http() as where:
        yield where


@contextmanager
def serving_http() -> Iterator[str]:
    """A server in a process of its own; its URL."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline:
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


async def begun(
    env: type[Environment], *, timeout_s: float = 20.0, size: int = 1
) -> list[EnvironmentSession]:
    source = await environment_source(env, step_timeout_s=timeout_s)
    sessions = await source.open_group(task=TASKS["train"][0], seed=1, size=size)
    for session in sessions:
        assert await session.begin() == Observation("What is 2 + 3?")
    return list(sessions)


async def said(session: EnvironmentSession, seq: int, name: str, arguments: Any = None) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    result = await session.step(Action("", (ToolCall(name, text, "call-1"),)), seq)
    assert result.observation is not None
    (message,) = result.observation.messages
    assert (message.role, message.name, message.tool_call_id) == ("tool", name, "call-1")
    return message.content.text if message.content.is_text else repr(message.content.images)


async def test_a_model_calls_tools_and_is_graded_by_what_they_did(env: type[Environment]) -> None:
    (session,) = await begun(env)
    assert await said(session, 1, "add", {"a": 2, "b": 3}) == "5"
    assert await said(session, 2, "note", {"text": "five"}) == "1 kept"
    end = await session.step(Action("5"), 3)
    assert (end.terminated, end.reward.value) == (True, 1.0)
    assert (await session.finalize()).reward.value == 1.0
    await session.close()


async def test_mistakes_are_told_to_the_model(env: type[Environment]) -> None:
    (session,) = await begun(env)
    assert "no tool 'subtract'" in await said(session, 1, "subtract")
    assert "no JSON" in await said(session, 2, "add", '{"a": ')
    assert "of type object" in await said(session, 3, "add", "[1]")
    assert "arguments.a: 'two' is not of type 'integer'" in await said(
        session, 4, "add", {"a": "two", "b": 1}
    )
    assert "'b' is a required property" in await said(session, 5, "add", {"a": 1})
    assert "no such page" in await said(session, 6, "fail")
    assert "Image(data=" in await said(session, 7, "picture")
    # The episode goes on after all of it.
    assert await said(session, 8, "add", {"a": 1, "b": 1}) == "2"
    await session.close()


@pytest.mark.slow
async def test_a_picture_is_an_image(env: type[Environment]) -> None:
    (session,) = await begun(env)
    result = await session.step(Action("", (ToolCall("picture"), ToolCall("add", '{"a": 1, "b": 2}'))), 1)
    assert result.observation is not None
    first, second = result.observation.messages
    assert isinstance(first.content.images[0], Image)
    assert second.content.text == "3"
    await session.close()


@pytest.mark.slow
async def test_each_episode_has_a_server_of_its_own_without_our_secrets(env: type[Environment]) -> None:
    one, other = await begun(env, size=2)
    pids = [await said(session, 1, "whoami") for session in (one, other)]
    assert pids[0] != pids[1]
    assert all(each.endswith(" hello ") for each in pids)
    await said(one, 2, "note", {"text": "mine"})
    assert "mine" in await said(one, 3, "notes")
    assert "mine" not in await said(other, 2, "notes")
    for session in (one, other):
        await session.close()
    for pid in pids:
        assert not alive(int(pid.split()[0]))


@pytest.mark.slow
async def test_an_episode_without_an_answer_is_graded_as_it_stands(env: type[Environment]) -> None:
    (session,) = await begun(env)
    await said(session, 1, "note", {"text": "five"})
    assert (await session.finalize()).reward.value == 0.5
    await session.close()


async def test_b108_a_server_that_dies_ends_its_episode_only(env: type[Environment]) -> None:
    dying, other = await begun(env, size=2)
    with pytest.raises(EnvironmentCrashed, match="ServerLost") as raised:
        await said(dying, 1, "die")
    assert end_reason_of(raised.value) is EndReason.ENV_CRASH
    assert await said(other, 1, "add", {"a": 1, "b": 1}) == "2"
    await other.close()


@pytest.mark.slow
async def test_a_server_that_died_unseen_is_no_reward(env: type[Environment]) -> None:
    (session,) = await begun(env)
    pid = int((await said(session, 1, "whoami")).split()[0])
    os.kill(pid, 9)
    with pytest.raises(EnvironmentCrashed, match="lost"):
        await session.step(Action("5"), 2)
    with pytest.raises(EnvironmentCrashed):
        await session.finalize()


@pytest.mark.slow
async def test_a_slow_tool_meets_the_deadline_and_its_server_ends(env: type[Environment]) -> None:
    (session,) = await begun(env, timeout_s=5.0)
    pid = int((await said(session, 1, "whoami")).split()[0])
    session._timeout_s = 0.5  # type: ignore[attr-defined]
    with pytest.raises(StepTimeout):
        await said(session, 2, "sleep", {"seconds": 60})
    await session.close()
    await wait_until(lambda: not alive(pid), 15, what="the server has ended")


@pytest.mark.slow
async def test_only_allowed_tools_are_offered(program: McpServer) -> None:
    async def prepare(session: McpSession, task: dict[str, Any], seed: int) -> None:
        await session.call("note", {"text": f"five {seed}"})

    env = mcp_environment(program, TASKS, reward=graded, allowed=("add",), prepare=prepare, name="sums")
    info = describe(env)
    assert [schema["function"]["name"] for schema in info.tools] == ["add"]
    assert info.tools[0]["function"]["description"] == "Adds two numbers."
    assert info.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert (info.name, info.splits, info.deterministic) == ("sums", ("train", "test"), False)
    (session,) = await begun(env)
    assert "no tool 'note'" in await said(session, 1, "note", {"text": "x"})
    end = await session.step(Action("6"), 2)
    assert end.reward.value == 0.5  # what `prepare` noted
    await session.close()
    with pytest.raises(
        EnvironmentDefinitionError, match=r"allowed: the server has no tool 'multiply'; its tools: add"
    ):
        mcp_environment(program, TASKS, reward=graded, allowed=("multiply",))


@pytest.mark.slow
async def test_a_grader_that_fails_is_no_reward(program: McpServer) -> None:
    def grade(answer: str, task: dict[str, Any], session: McpSession) -> float:
        if threading.current_thread() is threading.main_thread():
            raise AssertionError("a plain grader may block: it must not run on the loop")
        raise KeyError(answer)

    (session,) = await begun(mcp_environment(program, TASKS, reward=grade))
    end = await session.step(Action("6"), 1)
    assert (end.reward.status, end.info) == (RewardStatus.GRADER_ERROR, {"grader_error": "KeyError: '6'"})
    await session.close()


def test_what_is_no_server_is_refused_where_it_is_named() -> None:
    for server in (McpServer.program("/nonexistent/server"), McpServer.at("http://127.0.0.1:9/mcp")):
        with pytest.raises(EnvironmentDefinitionError, match="cannot be listed"):
            mcp_environment(server, TASKS, reward=graded)
    with pytest.raises(EnvironmentDefinitionError, match="needs a command"):
        McpServer.program()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_server_over_http(url: str, mode: str) -> None:
    server = McpServer.at(url, headers={"authorization": "Bearer x"}, mode=mode)
    env = mcp_environment(server, TASKS, reward=graded, allowed=("add", "note", "fail"))
    one, other = await begun(env, size=2)
    sums = await asyncio.gather(
        *(said(each, 1, "add", {"a": i, "b": 1}) for i, each in enumerate((one, other)))
    )
    assert sums == ["1", "2"]
    assert "no such page" in await said(one, 2, "fail")
    await said(one, 3, "note", {"text": "five"})
    assert (await one.step(Action("5"), 4)).reward.value == 1.0
    for session in (one, other):
        await session.close()


@pytest.mark.slow
async def test_b108_an_http_server_that_is_gone_ends_the_episode() -> None:
    with serving_http() as url:
        (session,) = await begun(mcp_environment(McpServer.at(url), TASKS, reward=graded))
    with pytest.raises(EnvironmentCrashed, match="lost"):
        await said(session, 1, "add", {"a": 1, "b": 1})


@pytest.mark.slow
def test_it_plays_where_calls_come_from_tasks_of_their_own(env: type[Environment]) -> None:
    """As in a worker of env_host: begin, step and close are each a task."""

    async def play() -> float | None:
        runner = Runner(env, {})
        await asyncio.create_task(runner.begin(1, TASKS["train"][0]))
        result = await asyncio.create_task(runner.step({"agent": Action("5")}))
        await asyncio.create_task(runner.close())
        return result.rewards["agent"].value

    assert asyncio.run(play()) == 0.5


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
