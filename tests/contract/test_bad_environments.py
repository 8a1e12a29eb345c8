"""Environments and agents that do everything wrong: each episode ends with the right reason, nothing becomes
a reward by accident, and others go on (field bugs B43, B66, B74, B107, B108).

Each is played through the agent loop, in this process, on a real env_host over Drive, and there by a call
each.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from client.tests.doubles.tokenizers import files

from opentinker.environments import EndReason, Environment, EnvironmentSource, environment_source
from opentinker.environments.types import AGENT
from opentinker.rollout.agent_loop import AgentLoop
from opentinker.rollout.episode_loop import EpisodeLoop
from opentinker.rollout.limits import Limits
from opentinker.rollout.renderer import Renderer
from opentinker.rollout.trajectory import Trajectory
from opentinker.sampling.completion import Completion, StopReason
from opentinker_kit.testing.waiting import wait_until_sync
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.render import ChatTokenizer
from tests.contract import bad_worlds
from tests.contract.bad_worlds import ENDINGS, HARMLESS, MISDEEDS, Bad, BadAsync, Belt, Endless

CHAT = ChatTokenizer(files())
NAMES: dict[type[Environment], str] = {Bad: "bad", BadAsync: "bad_async", Belt: "belt", Endless: "endless"}
FOLDER = Path(bad_worlds.__file__).parent


@pytest.fixture(scope="module")
def host_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A host whose workers may take 512 MiB."""
    folder = tmp_path_factory.mktemp("env_host")
    ready = folder / "ready.json"
    settings = {
        "environments": {
            name: {"target": f"bad_worlds:{cls.__name__}", "path": [str(FOLDER)]}
            for cls, name in NAMES.items()
        },
        "state_dir": str(folder / "state"),
        "ready_file": str(ready),
        "drain_s": 0.5,
        "worker_memory_bytes": 512 << 20,
        "warm_workers": 0,
        "max_workers": 1,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "opentinker_env_host", "--settings", str(folder / "settings.json")]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            wait_until_sync(ready.exists, 60, what=f"env_host is ready; see {folder / 'log'}")
            yield json.loads(ready.read_text())["port"]
        finally:
            process.terminate()


class Place:
    """Where episodes are played."""

    def __init__(self, how: str, channel: grpc.aio.Channel | None) -> None:
        self.how = how
        self._channel = channel

    async def source(
        self, env: type[Environment], timeout_s: float = 10.0, **options: Any
    ) -> EnvironmentSource:
        if self.how == "here":
            return await environment_source(env, options, step_timeout_s=timeout_s)
        source: Any = await environment_source(
            NAMES[env], options, channel=self._channel, step_timeout_s=timeout_s
        )
        if self.how == "unary":
            source.calls._offered = False
        return source


@pytest.fixture(params=["here", "drive", "unary"])
async def place(request: pytest.FixtureRequest, host_port: int) -> AsyncIterator[Place]:
    async with open_channel(f"127.0.0.1:{host_port}") as channel:
        yield Place(request.param, channel)


class Script:
    """Says one thing after the other, the last again and again."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    async def __call__(self, turn: int, prompt: Sequence[int], room: int) -> Completion:
        text = self.texts[min(turn, len(self.texts) - 1)]
        ids = (*CHAT.encode(text), CHAT.eos_ids[0])
        return Completion(0, ids, np.full(len(ids), -0.25, np.float32), StopReason.END, text, seed=1)


async def play(
    source: EnvironmentSource, *texts: str, limits: Limits | None = None, context: int = 1500
) -> Trajectory:
    (session,) = await source.open_group(task={}, seed=0, size=1)
    loop = AgentLoop(
        Renderer(CHAT, source.info.tools),
        Script(*texts),
        group="g",
        member=0,
        version=1,
        limits=limits or Limits(),
        max_tokens=None,
        context_tokens=context,
        temperature=1.0,
    )
    episode = EpisodeLoop(session, {AGENT: loop}, limits or Limits())
    await episode.begin()
    (trajectory,) = await episode.play()
    return trajectory


CRASH = (EndReason.ENV_CRASH, None, False)
SOLVED = (EndReason.TERMINATED, 1.0, True)


def outcome(played: Trajectory) -> tuple[EndReason, float | None, bool]:
    """Why it ended, its reward, whether that counts."""
    return played.end_reason, played.reward.value, played.counts


async def beside_good_ones(
    source: EnvironmentSource, bad: Mapping[str, Coroutine[Any, Any, Trajectory]]
) -> dict[str, Trajectory]:
    """What the bad ones came to. As many good ones are played at the same time, and are as they are alone."""
    alone = await play(source, "on", "on", "end")
    played = await asyncio.gather(*bad.values(), *(play(source, "on", "on", "end") for _ in bad))
    for good in played[len(bad) :]:
        assert outcome(good) == SOLVED, good.error
        assert good.messages == alone.messages
    return dict(zip(bad, played, strict=False))


@pytest.mark.parametrize("env", [Bad, BadAsync])
async def test_what_a_step_does_wrong_is_a_crash(place: Place, env: type[Environment]) -> None:
    source = await place.source(env)
    # On the event loop of this process a KeyboardInterrupt is the user's.
    mine = {"is interrupted"} if (place.how, env) == ("here", BadAsync) else set()
    names = [name for name in MISDEEDS if name not in mine]
    played = await beside_good_ones(source, {name: play(source, "on", name, "end") for name in names})
    assert {name: outcome(each) for name, each in played.items()} == dict.fromkeys(names, CRASH)
    assert {len(each.turns) for each in played.values()} == {2}
    await source.close()


async def test_what_reset_does_wrong_is_a_crash(place: Place) -> None:
    good = await place.source(Bad)
    bad = {name: await place.source(Bad, at="reset", misdeed=name) for name in MISDEEDS}
    played = await beside_good_ones(good, {name: play(source, "end") for name, source in bad.items()})
    assert {name: outcome(each) for name, each in played.items()} == dict.fromkeys(MISDEEDS, CRASH)
    assert not any(each.turns for each in played.values())
    for source in (good, *bad.values()):
        await source.close()


async def test_what_the_end_does_wrong_is_a_crash(place: Place) -> None:
    good = await place.source(Bad)
    wrong = [
        ("finalize", name) for name in (*ENDINGS, "raises", "raises StopIteration", "leaves the program")
    ]
    wrong += [("metrics", name) for name in ENDINGS]
    bad = {f"{at}: {name}": await place.source(Bad, at=at, misdeed=name) for at, name in wrong}
    played = await beside_good_ones(good, {name: play(source, "on", "end") for name, source in bad.items()})
    assert {name: outcome(each) for name, each in played.items()} == dict.fromkeys(bad, CRASH)
    for source in (good, *bad.values()):
        await source.close()


@pytest.mark.parametrize("env", [Bad, BadAsync])
async def test_what_does_no_harm(place: Place, env: type[Environment]) -> None:
    source = await place.source(env)
    played = await beside_good_ones(source, {name: play(source, name, name, "end") for name in HARMLESS})
    assert {name: outcome(each) for name, each in played.items()} == dict.fromkeys(HARMLESS, SOLVED)
    await source.close()


@pytest.mark.parametrize("env", [Bad, BadAsync])
@pytest.mark.parametrize("how", ["drive", "unary"])
async def test_memory_and_forks_in_a_process_of_its_own(
    host_port: int, how: str, env: type[Environment]
) -> None:
    async with open_channel(f"127.0.0.1:{host_port}") as channel:
        source = await Place(how, channel).source(env)
        told = {name: play(source, "on", name, "end") for name in ("eats memory", "forks in two")}
        played = await beside_good_ones(source, told)
        assert outcome(played["eats memory"]) == CRASH
        assert "MemoryError" in played["eats memory"].error
        assert outcome(played["forks in two"]) == SOLVED, played["forks in two"].error
        await source.close()


async def test_a_step_that_hangs_is_a_timeout(place: Place) -> None:
    source = await place.source(Bad, timeout_s=1.0)
    played = await beside_good_ones(source, {"hangs": play(source, "on", "hangs", "end")})
    assert outcome(played["hangs"]) == (EndReason.STEP_TIMEOUT, None, False)
    await source.close()


CALL = '<tool_call>{"name": "count", "arguments": {"number": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("env", "says", "limits", "end", "turns"),
    [
        (Belt, '<tool_call>{"name": "count", "arg', Limits(parse_errors=3), EndReason.PARSE_ERROR_LIMIT, 4),
        (Belt, "<tool_call>" * 40, Limits(parse_errors=40, turns=3), EndReason.PARSE_ERROR_LIMIT, 2),
        (Belt, '<tool_call>{"name": "destroy"}</tool_call>', Limits(turns=3), EndReason.TURN_LIMIT, 3),
        (Belt, CALL, Limits(tool_calls=3), EndReason.TOOL_LIMIT, 4),
        (Belt, CALL, Limits(), EndReason.TOKEN_LIMIT, None),
        (Endless, "more", Limits(turns=5), EndReason.TURN_LIMIT, 5),
        (Endless, "more", Limits(tokens_per_episode=300), EndReason.TOKEN_LIMIT, None),
        (Endless, "more", Limits(), EndReason.TOKEN_LIMIT, None),
        (Endless, "", Limits(), EndReason.TOKEN_LIMIT, None),
    ],
)
async def test_agents_that_never_stop(
    place: Place, env: type[Environment], says: str, limits: Limits, end: EndReason, turns: int | None
) -> None:
    """What the model did counts, if there is a reward; without one there is none, and not 0."""
    source = await place.source(env)
    played = await play(source, says, limits=limits, context=1500 if end is EndReason.TOKEN_LIMIT else 5000)
    assert played.end_reason is end, played.error
    assert turns is None or len(played.turns) == turns
    assert played.reward.value is None
    assert not played.counts
    await source.close()
