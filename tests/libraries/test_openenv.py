"""The real OpenEnv library, in a virtual environment of its own: in process, over WebSockets, and hosted."""

import subprocess
from pathlib import Path

import pytest

from opentinker.environments import Action, environment_source
from opentinkerapi.runtime.channels import open_channel
from tests.library_venv import library_python
from tests.stage import hosting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
OPENENV = "openenv-core==0.3.0"


@pytest.fixture(scope="module")
def python() -> str:
    return str(library_python("openenv", OPENENV))


def test_cases_in_an_environment_that_has_it(python: str) -> None:
    cases = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "openenv_cases.py")]
    done = subprocess.run(cases, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


async def test_it_is_hosted(python: str, tmp_path: Path) -> None:
    entry = {"target": "openenv_game:HostedGuess", "path": [str(HERE)], "python": python}
    with hosting(tmp_path, {"guess": entry}) as port:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            source = await environment_source("guess", channel=channel)
            (session,) = await source.open_group(task={"high": 2}, seed=4, size=1)
            assert (await session.begin()).text == '{"text": "1 to 2", "tries": 0}'
            results = [await session.step(Action('{"guess": 1}'), 1)]
            if not results[0].done:
                results.append(await session.step(Action('{"guess": 2}'), 2))
            assert (results[-1].terminated, (await session.finalize()).reward.value) == (True, 1.0)
            await source.close()
