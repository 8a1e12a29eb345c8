"""Failed episodes are announced, and nothing waits for NATS."""

import asyncio
import time
from contextlib import aclosing

import pytest
from services.env_host.tests.conftest import Start

from opentinker_kit.events import NatsEventBus
from opentinker_kit.testing.servers import NatsServer
from opentinkerapi.runtime.errors import EnvironmentCrashed


async def test_a_failed_episode_is_announced_on_nats(start: Start, nats_server: NatsServer) -> None:
    host = await start(real_bus=True, nats_url=nats_server.url, instance_id="one")
    bus = NatsEventBus(nats_server.url)
    bus.start()
    async with aclosing(bus.subscribe("opentinker.v1.episode.failed", "env-host-test")) as facts:  # type: ignore[type-var]
        (episode,) = await host.open()
        await host.begin(episode)
        with pytest.raises(EnvironmentCrashed):
            await host.step(episode, 1, "raise")
        async with asyncio.timeout(20):
            event = await anext(facts)
    await bus.close()
    assert event.source == "env_host/one"
    assert event.episode_failed.episode == episode
    assert event.episode_failed.environment == "environments/counter"
    assert event.episode_failed.reason == "ENV_CRASH"


async def test_nothing_waits_for_a_bus_that_is_down(start: Start) -> None:
    host = await start(real_bus=True, nats_url="nats://127.0.0.1:9")
    (bad, good) = await host.open(size=2)
    for episode in (bad, good):
        await host.begin(episode)
    began = time.monotonic()
    with pytest.raises(EnvironmentCrashed):
        await host.step(bad, 1, "raise")
    await host.step(good, 1, "go")
    assert time.monotonic() - began < 2
