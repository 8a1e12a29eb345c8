"""The real verifiers library, hosted in a virtual environment of its own, on the real gateway."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from services.gateway.tests.conftest import World, gateway_settings, serving

from opentinker.environments import EndReason, environment_source
from opentinker.rollout.limits import Limits
from opentinkerapi.runtime.channels import open_channel
from tests.library_venv import library_python
from tests.stage import Stage, hosting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
VERIFIERS = "verifiers==0.4.0"


@pytest.fixture(scope="module")
def host_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    python = str(library_python("verifiers", VERIFIERS))
    entry = {"target": "verifiers_sums:Sums", "path": [str(HERE)], "python": python}
    with hosting(tmp_path_factory.mktemp("env_host"), {"sums": entry}) as port:
        yield port


@pytest.fixture
async def stage(host_port: int, tmp_path: Path) -> AsyncIterator[Stage]:
    async with (
        serving(gateway_settings(tmp_path)) as world,
        open_channel(f"127.0.0.1:{host_port}") as channel,
    ):
        source = await environment_source("sums", channel=channel)
        yield Stage(world, source)
        await source.close()


def said(world: World, index: int) -> str:
    return world.inference.prompt_text(index)


async def test_tasks_rewards_and_tokens_are_the_librarys(stage: Stage) -> None:
    tasks = await stage.source.tasks("train")
    assert tasks == [{"split": "train", "index": index} for index in range(3)]
    stage.world.inference.script = ["one", "two", "one", "three"]
    first = await stage.play(dict(tasks[0]))
    assert (first.end_reason, first.error) == (EndReason.TERMINATED, "")
    assert first.reward.value == 2.0
    assert first.reward.components == {"right": 2.0}
    assert first.metrics == {"turns": 2.0}
    assert [turn.text for turn in first.turns] == ["one", "two"]
    assert len(first.segments) == 1
    assert "1 + 1?" in said(stage.world, 0)
    second = await stage.play(dict(tasks[1]))
    assert second.reward.value == 0.0
    assert "2 + 2?" in said(stage.world, 2)


async def test_what_the_library_calls_an_error_is_no_reward(stage: Stage) -> None:
    broken = await stage.play({"split": "train", "index": 2})
    assert (broken.end_reason, broken.reward.value) == (EndReason.ENV_CRASH, None)
    assert "the grader's own fault" in broken.error


async def test_a_limit_is_the_models_own_end(stage: Stage) -> None:
    limited = await stage.play({"split": "test", "index": 0}, Limits(turns=1))
    assert (limited.end_reason, len(limited.turns)) == (EndReason.TURN_LIMIT, 1)
    assert limited.reward.value is None
