"""The commands around environments, against a real env_host."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from opentinker.cli.app import app
from opentinker.environments import environment_source
from opentinker.environments.hosted import HostedEnvironment
from opentinker.environments.packing import pack
from opentinker.environments.types import Action
from opentinker.errors import OpenTinkerError
from opentinker_env_host.adapters.jails import default_folder
from opentinker_env_host.bootstrap import build
from opentinker_env_host.settings import EnvHostSettings
from opentinkerapi.runtime.channels import open_channel

CODE = """\
import opentinker as ot

class Echo(ot.Environment):
    def reset(self, *, seed, task):
        return ot.Observation(f"seed {seed}")

    def step(self, action):
        return ot.StepResult(None, reward=float(action.text == "yes"), terminated=True)
"""
PYPROJECT = """\
[project]
name = "Echo Game"
requires-python = ">=3.11"
dependencies = ["opentinker>=0.1"]

[tool.opentinker]
environment = "echo_game:Echo"
"""
Env = Callable[..., Awaitable[Result]]


@pytest.fixture
async def env(tmp_path: Path) -> AsyncIterator[tuple[Env, str]]:
    """Runs `opentinker env` on a host; and its address."""
    state = tmp_path / "state"
    host = build(EnvHostSettings(environments={}, state_dir=state, drain_s=1.0))
    address = f"127.0.0.1:{await host.start()}"
    serving = asyncio.create_task(host.serve())

    async def run(*words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, ["env", "--at", address, *words])

    yield run, address
    await host.server.drain()
    await serving
    await host.stop()
    shutil.rmtree(default_folder(state), ignore_errors=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The source of an environment."""
    made = tmp_path / "game"
    (made / "src").mkdir(parents=True)
    (made / "src" / "echo_game.py").write_text(CODE)
    (made / "pyproject.toml").write_text(PYPROJECT)
    (made / "__pycache__").mkdir()
    (made / "__pycache__" / "x.pyc").write_text("")
    (made / ".env").write_text("SECRET=1")
    return made


async def test_an_environment_is_pushed_played_and_deleted(env: tuple[Env, str], folder: Path) -> None:
    run, address = env
    done = await run("list")
    assert (done.exit_code, "env push FOLDER" in done.output) == (0, True)
    done = await run("push", str(folder), "--json")
    assert done.exit_code == 0, done.output
    version = json.loads(done.output.splitlines()[-1])
    assert (version["name"], version["state"]) == ("echo-game@1", "ready")
    assert (version["target"], version["requirements"]) == ("echo_game:Echo", [])
    # Again: the same files are the same version.
    assert "echo-game@1 is ready" in (await run("push", str(folder))).output
    async with open_channel(address) as channel:
        # A name alone is pinned to the version that is the newest now.
        source = await environment_source("echo-game", channel=channel)
        assert isinstance(source, HostedEnvironment)
        assert source.info.name == "echo-game@1"
        (session,) = await source.open_group(task={}, seed=3, size=1)
        assert (await session.begin()).text == "seed 3"
        assert (await session.step(Action("yes"), 1)).reward.value == 1.0
        await source.close()
    assert json.loads((await run("list", "--json")).output.splitlines()[-1])[0]["name"] == "echo-game@1"
    assert "echo_game:Echo" in (await run("show", "echo-game")).output
    done = await run("probe", "echo-game", "--json", "--seeds", "2")
    assert (done.exit_code, json.loads(done.output.splitlines()[-1])["warnings"]) == (0, [])
    assert "== build" in (await run("logs", "echo-game")).output
    assert (await run("delete", "echo-game@1")).exit_code == 0
    done = await run("show", "echo-game")
    assert "no environment 'echo-game'" in str(done.exception)
    done = await run("push", str(folder), "--target", "echo_game:Nothing")
    assert (done.exit_code, "echo-game@2 cannot be played" in done.output) == (1, True)


def test_packages_are_packed_the_same_each_time(folder: Path) -> None:
    first = pack(folder)
    (folder / "pyproject.toml").touch()
    assert pack(folder) == first
    assert (first.name, first.requires_python) == ("echo-game", ">=3.11")
    assert b"SECRET" not in first.archive
    assert b"x.pyc" not in first.archive
    assert pack(folder, requirements=["numpy"], name="other").requirements == ("numpy",)


def test_what_cannot_be_packed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OpenTinkerError, match="neither a folder nor a wheel"):
        pack(tmp_path / "none")
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(OpenTinkerError, match="is a link"):
        pack(folder)
    (folder / "link").unlink()
    (folder / "pyproject.toml").write_text("[")
    with pytest.raises(OpenTinkerError, match="cannot be read"):
        pack(folder)
    (folder / "pyproject.toml").unlink()
    with pytest.raises(OpenTinkerError, match="--target module:Class"):
        pack(folder)


@pytest.mark.slow
async def test_a_class_is_served_from_here(folder: Path) -> None:
    words = [sys.executable, "-c", "from opentinker.cli import main; main()", "env", "serve"]
    process = await asyncio.create_subprocess_exec(
        *words, "echo_game:Echo", "--path", str(folder / "src"), stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        address = line.split()[-1]
        async with open_channel(address) as channel:
            source = await environment_source("echo", channel=channel)
            (session,) = await source.open_group(task={}, seed=3, size=1)
            assert (await session.begin()).text == "seed 3"
            await source.close()
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 0


def test_serving_warns_of_a_class_that_drops_its_seed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lucky.py").write_text(
        CODE.replace("import opentinker", "import time\nimport opentinker").replace(
            "{seed}", "{time.time_ns()}"
        )
    )
    done = CliRunner().invoke(app, ["env", "serve", "lucky:Nothing", "--path", str(tmp_path)])
    assert "has no attribute 'Nothing'" in str(done.exception)
    words = [sys.executable, "-c", "from opentinker.cli import main; main()", "env", "probe", "lucky:Echo"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert b"WARNING: IT DROPS ITS SEED" in done.stderr
