"""The use cases play alike in this process and on an env_host that was given the folder of the examples."""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.customer_service import Clerk, CustomerService
from examples.geometry import Geometry
from examples.geometry import expert as expert_of_figures
from examples.gomoku import Gomoku, expert
from examples.household import Household, Resident
from examples.maths import WordProblems
from examples.maths_with_python import MathsWithPython
from examples.phone import Owner, PhoneUse
from opentinker.environments import Environment, EnvironmentSource, Observation, environment_source
from opentinker_kit.testing.waiting import wait_until_sync
from opentinkerapi.runtime.channels import open_channel
from tests.examples.playing import heard

Script = Callable[[Observation, random.Random], str]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CASES: dict[str, type[Environment]] = {
    "customer_service": CustomerService,
    "geometry": Geometry,
    "gomoku": Gomoku,
    "household": Household,
    "maths": WordProblems,
    "maths_with_python": MathsWithPython,
    "phone": PhoneUse,
}
SCRIPTS: dict[str, Callable[[], Script]] = {
    "customer_service": Clerk,
    "geometry": lambda: expert_of_figures,
    "gomoku": lambda: expert,
    "household": Resident,
    "phone": Owner,
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an env_host of its own."""
    folder = tmp_path_factory.mktemp("env_host")
    entries = {
        name: {"target": f"{name}:{cls.__name__}", "path": [str(EXAMPLES)]} for name, cls in CASES.items()
    }
    settings = {
        "environments": entries,
        "state_dir": str(folder / "state"),
        "ready_file": str(folder / "ready.json"),
        "listen_port": 0,
        "drain_s": 0.5,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "opentinker_env_host", "--settings", str(folder / "settings.json")]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            ready = folder / "ready.json"
            wait_until_sync(ready.exists, 60, what=f"env_host is ready; see {folder / 'log'}")
            yield f"127.0.0.1:{json.loads(ready.read_text())['port']}"
        finally:
            process.terminate()


def script_of(name: str) -> Script:
    if name in SCRIPTS:
        return SCRIPTS[name]()
    return lambda seen, dice: (
        "```python\n6 * 7\n```" if dice.random() < 0.5 else f"Answer: {dice.randint(1, 40)}"
    )


async def played(source: EnvironmentSource, name: str, seed: int) -> list[Any]:
    """All that is seen in an episode that a script plays, and what it comes to."""
    script, dice = script_of(name), random.Random(seed)
    (session,) = await source.open_group(task={}, seed=seed, size=1)
    pending = await session.begin_all()
    told: list[Any] = [pending]
    for seq in range(1, 60):
        tools = CASES[name].tools
        actions = {agent: heard(script(seen, dice), tools) for agent, seen in pending.items()}
        step = await session.step_all(actions, seq)
        told.append(step)
        if step.done:
            break
        pending = step.observations
    told.append(await session.finalize_all())
    await session.close()
    return told


@pytest.mark.parametrize("name", CASES)
async def test_hosted_and_in_process_episodes_are_the_same(host: str, name: str) -> None:
    async with open_channel(host) as channel:
        hosted = await environment_source(name, channel=channel)
        local = await environment_source(CASES[name])
        assert hosted.info.tools == local.info.tools
        assert hosted.info.agents == local.info.agents
        assert await hosted.tasks("test") == await local.tasks("test")
        for seed in range(3):
            there, here = await played(hosted, name, seed), await played(local, name, seed)
            assert there == here
            assert there[-2].done
