"""The commands around accounts, against a real scheduler."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import opentinker as ot
from opentinker import errors
from opentinker.cli.app import app
from opentinker_kit.files import make_key_file
from opentinker_kit.settings import read_secret
from opentinker_scheduler.bootstrap import Scheduler
from opentinker_scheduler.settings import SchedulerSettings

Run = Callable[..., Coroutine[Any, Any, Any]]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[str, str]]:
    """Address and bootstrap key of a scheduler."""
    keys = {f"{name}_key_file": make_key_file(tmp_path / f"{name}.key") for name in ("bootstrap", "service")}
    scheduler = Scheduler(SchedulerSettings(**keys, state_dir=tmp_path, launcher="static", drain_s=1.0))
    port = await scheduler.start()
    yield f"127.0.0.1:{port}", read_secret(keys["bootstrap_key_file"])
    await scheduler.server.drain()
    await scheduler.run()


@pytest.fixture
def run(cluster: tuple[str, str]) -> Run:
    """Run a command line, with the bootstrap key or another; its result."""
    address, bootstrap = cluster

    async def command(*words: str, key: str = bootstrap) -> Any:
        first, *rest = words
        where = ["--address", address, "--key", key]
        groups = ("users", "projects", "keys")
        argv = [first, *where, *rest] if first in groups else [first, *rest, *where]
        # In another thread: the scheduler answers on this one's loop.
        return await asyncio.to_thread(CliRunner().invoke, app, argv, env={"COLUMNS": "200"})

    return command


async def test_from_a_new_user_to_a_revoked_key(cluster: tuple[str, str], run: Run) -> None:
    async def ok(*words: str, **more: str) -> str:
        done = await run(*words, **more)
        assert done.exit_code == 0, (words, done.output, done.exception)
        return str(done.output)

    assert "no users" in await ok("users")
    assert "vision is projects/" in await ok("projects", "create", "vision")
    assert "ann is users/" in await ok("users", "create", "ann")
    assert "is member of projects/" in await ok("projects", "add", "ann", "--project", "vision")
    ann = ("--user", "ann", "--project", "vision")
    made = await ok("keys", "create", *ann, "--days", "90", "--name", "laptop")
    key = made.splitlines()[-1]
    assert key.startswith("otk_")
    assert "member of projects/" in await ok("whoami", key=key)
    assert "ann" in await ok("users")
    assert "vision" in await ok("projects", key=key)
    listed = await ok("keys", key=key)
    assert "laptop" in listed
    assert key not in listed
    with await asyncio.to_thread(ot.connect, cluster[0], key=key) as connected:
        assert await connected.jobs() == []
    refused = await run("users", key=key)
    assert isinstance(refused.exception, errors.PermissionDenied)
    name = next(word for word in listed.split() if word.startswith("apiKeys/"))
    assert "is revoked" in await ok("keys", "revoke", name)
    assert isinstance((await run("whoami", key=key)).exception, errors.Unauthenticated)
    told = await ok("audit", "--limit", "30")
    assert all(word in told for word in ("CreateUser", "RevokeApiKey", "PERMISSION_DENIED"))
    assert "is disabled" in await ok("users", "disable", "ann")
    assert "is enabled" in await ok("users", "enable", "ann")
    assert "a member no longer" in await ok("projects", "remove", "ann", "--project", "vision")
    assert "no members" in await ok("projects", "members", "--project", "vision")


async def test_what_is_not_there_is_said(run: Run) -> None:
    done = await run("keys", "create", "--user", "nobody")
    assert isinstance(done.exception, errors.NotFound)
    assert "there is no user 'nobody'" in str(done.exception)
    done = await run("projects", "add", "users/none", "--role", "king")
    assert isinstance(done.exception, errors.InvalidArgument)
