"""A published version stays what it is, though its files are uploaded after it is registered."""

import asyncio
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from services.trainer.tests.server.fakes import FakeEngine
from services.trainer.tests.server.harness import Client
from services.trainer.tests.server.test_faults import World, learn

from opentinker_kit.testing import wait_until


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def version_file(key: str) -> bool:
    return "/versions/1/" in key and not key.endswith("/manifest.json")


def manifest(world: World, client: Client) -> dict[str, Any]:
    return dict(json.loads(world.objects._objects[f"{client.policy}/versions/1/manifest.json"][0]))


def arrived(world: World, client: Client) -> bool:
    """Whether every file of version 1 is there, as its manifest says."""
    stored = world.objects._objects
    return all(
        hashlib.sha256(stored.get(f"{client.policy}/versions/1/{file['name']}", (b"",))[0]).hexdigest()
        == file["sha256"]
        for file in manifest(world, client)["files"]
    )


async def published_and_died(world: World) -> Client:
    """Version 1 is DONE, its files are nowhere but on the host, which dies some steps later."""
    world.objects.away = version_file
    async with world.trainer(recovery_every_steps=1) as client:
        await client.create()
        await learn(client)
        version = (await client.done(await client.publish())).publish_weights.version
        assert version.version == 1
        await learn(client)
        await asyncio.sleep(0.2)  # for what must not happen
        assert not arrived(world, client)
        behind = [key for key in world.manifests("recovery") if int(key.split("/")[-2]) > 3]
        assert not behind, "a restart would go on from behind the version"
    world.objects.away = lambda _: False
    return client


async def test_a_version_whose_host_died_is_made_again(world: World) -> None:
    client = await published_and_died(world)
    shutil.rmtree(world.directory / "state")
    async with world.trainer() as again:
        await again.create()
        again.seq = client.seq
        await again.result(client.seq)
        await wait_until(lambda: arrived(world, client), 5)
        assert (await again.done(await again.publish())).publish_weights.version.version == 2


@pytest.mark.parametrize("disk", ["kept", "lost"])
async def test_a_version_that_a_replay_does_not_make_again(
    disk: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await published_and_died(world)
    if disk == "lost":
        shutil.rmtree(world.directory / "state")
    original = FakeEngine.restore

    async def other(self: FakeEngine, policy: str, *rest: Any, **more: Any) -> Any:
        restored = await original(self, policy, *rest, **more)
        self.history[policy].append("noise")
        return restored

    monkeypatch.setattr(FakeEngine, "restore", other)
    async with world.trainer() as again:
        await again.create()
        assert (await again.result(3)).publish_weights.version.version == 2
        if disk == "kept":
            await wait_until(lambda: arrived(world, client), 5)
            assert not manifest(world, client).get("lost")
        else:
            await wait_until(lambda: manifest(world, client).get("lost") is True, 5)
            assert not arrived(world, client)
