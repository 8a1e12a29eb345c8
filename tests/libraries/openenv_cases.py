"""The real OpenEnv library; run by `test_openenv` in an environment that has it."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import openenv_game as game  # noqa: E402

from opentinker.environments import (  # noqa: E402
    Action,
    EndReason,
    Environment,
    EnvironmentDefinitionError,
    EnvironmentSession,
    Observation,
    RewardStatus,
    describe,
    end_reason_of,
    environment_source,
)
from opentinker.environments.adapters.openenv import openenv_environment  # noqa: E402
from opentinker.errors import EnvironmentCrashed, StepTimeout  # noqa: E402

TASKS = {"train": [{"high": 5}], "test": [{"high": 9}]}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with subprocess.Popen([sys.executable, str(HERE / "openenv_game.py"), str(port)]) as process:
        try:
            deadline = time.monotonic() + 60
            while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline:
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.kill()


@pytest.fixture(params=["class", "server"])
def env(request: pytest.FixtureRequest) -> type[Environment]:
    if request.param == "class":
        return openenv_environment(game.Guess, action=game.GuessAction, tasks=TASKS)
    return openenv_environment(request.getfixturevalue("server")[0], tasks=TASKS, name="Guess")


async def begun(env: Any, seed: int = 3, timeout_s: float = 20.0, size: int = 1) -> list[EnvironmentSession]:
    source = await environment_source(env, step_timeout_s=timeout_s)
    sessions = await source.open_group(task={"high": 5}, seed=seed, size=size)
    for session in sessions:
        assert await session.begin() == Observation('{"text": "1 to 5", "tries": 0}')
    return list(sessions)


async def played(session: EnvironmentSession) -> list[tuple[str, float | None, bool]]:
    """What each guess from 1 on brings."""
    outcome = []
    for guess in range(1, 6):
        result = await session.step(Action(f'{{"guess": {guess}}}'), guess)
        assert result.observation is not None
        outcome.append((result.observation.text, result.reward.value, result.terminated))
        if result.done:
            break
    return outcome


async def test_observations_rewards_and_ends(env: type[Environment]) -> None:
    outcomes = set()
    for seed in range(6):
        (session,) = await begun(env, seed)
        outcome = await played(session)
        text, reward, terminated = outcome[-1]
        assert (terminated, reward) == (True, 1.0)
        assert '"text": "right"' in text
        total = (await session.finalize()).reward
        assert total.value == pytest.approx(1.0 - 0.1 * max(0, len(outcome) - 2))
        if len(outcome) > 2:
            assert [each[1] for each in outcome[:2]] == [None, -0.1]
        outcomes.add(len(outcome))
        await session.close()
        (again,) = await begun(env, seed)
        assert await played(again) == outcome, "the seed reaches the environment"
        await again.close()
    assert len(outcomes) > 1


async def test_a_seed_beyond_31_bits_is_taken(env: type[Environment]) -> None:
    (session,) = await begun(env, 2**64 - 1)
    await session.close()


async def test_episodes_are_sessions_of_their_own(env: type[Environment]) -> None:
    one, other = await begun(env, 3, size=2)
    await one.step(Action('{"guess": 1}'), 1)
    result = await other.step(Action('{"guess": 1}'), 1)
    assert result.observation is not None
    assert '"tries": 1' in result.observation.text
    for session in (one, other):
        await session.close()


@pytest.mark.parametrize(
    "text", ["seven", '{"guess": "x"}', '{"number": 3}', "[3]", "{", '{"guess": 3, "more": 1}']
)
async def test_what_is_no_action_is_told_to_the_model(env: type[Environment], text: str) -> None:
    (session,) = await begun(env)
    result = await session.step(Action(text), 1)
    assert result.observation is not None
    assert result.observation.text.startswith("That is no action")
    assert (result.done, result.reward.status) == (False, RewardStatus.UNSCORED)
    # It goes on.
    result = await session.step(Action('```json\n{"guess": 1}\n```'), 2)
    assert result.observation is not None
    assert '"tries": 1' in result.observation.text
    await session.close()


async def test_what_the_environment_raises_is_a_crash(env: type[Environment]) -> None:
    (session,) = await begun(env)
    with pytest.raises(EnvironmentCrashed, match="broken") as raised:
        await session.step(Action('{"guess": 77}'), 1)
    assert end_reason_of(raised.value) is EndReason.ENV_CRASH


async def test_a_slow_step_meets_its_deadline(env: type[Environment]) -> None:
    (session,) = await begun(env)
    session._timeout_s = 0.3  # type: ignore[attr-defined]
    with pytest.raises(StepTimeout):
        await session.step(Action('{"guess": 78}'), 1)
    await session.close()


async def test_one_text_is_said_and_shown_as_it_is() -> None:
    echo = openenv_environment(game.Echo, action=game.SayAction)
    source = await environment_source(echo)
    (session,) = await source.open_group(task={}, seed=1, size=1)
    assert await session.begin() == Observation("hello")
    result = await session.step(Action("ab"), 1)
    assert (result.observation, result.reward.value) == (Observation("abab"), 2.0)
    await session.close()
    shouting = openenv_environment(
        game.Echo,
        action=game.SayAction,
        parse=lambda text: {"message": text.upper()},
        render=lambda seen: seen["echo"] + "!",
    )
    (session,) = await (await environment_source(shouting)).open_group(task={}, seed=1, size=1)
    assert await session.begin() == Observation("hello!")
    result = await session.step(Action("a"), 1)
    assert result.observation == Observation("AA!")


def test_what_it_says_of_itself(env: type[Environment]) -> None:
    info = describe(env)
    assert (info.name, info.splits, info.deterministic) == ("Guess", ("train", "test"), False)


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(EnvironmentDefinitionError, match="give `action` with a class"):
        openenv_environment(game.Guess)
    with pytest.raises(EnvironmentDefinitionError, match="give `action` with a class"):
        openenv_environment("http://127.0.0.1:9", action=game.GuessAction)
    with pytest.raises(EnvironmentDefinitionError, match="no OpenEnv server"):
        openenv_environment("http://127.0.0.1:9")


async def test_zz_a_server_that_dies_is_a_crash(server: tuple[str, "subprocess.Popen[bytes]"]) -> None:
    """The last one: the server is gone afterwards."""
    (session,) = await begun(openenv_environment(server[0], tasks=TASKS))
    with pytest.raises(EnvironmentCrashed) as raised:
        await session.step(Action('{"guess": 79}'), 1)
    assert end_reason_of(raised.value) is EndReason.ENV_CRASH
    await asyncio.sleep(0)
