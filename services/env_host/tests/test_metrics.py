"""What an environment host shows to Prometheus."""

import asyncio

from services.env_host.tests.conftest import Start

from opentinker_kit.testing.metrics import scrape


async def test_episodes_and_steps(start: Start) -> None:
    host = await start(metrics_port=0)
    first, second = await host.open(seed=7, size=2)
    await host.begin(first)
    await host.step(first, 1, "go")
    # A repetition is no step.
    await host.step(first, 1, "go")
    await host.close([second])
    page = await asyncio.to_thread(scrape, host.env_host.server.metrics_port)
    assert page.value("opentinker_env_host_episodes") == 1
    assert page.value("opentinker_env_host_episodes_opened_total", environment="counter") == 2
    assert page.value("opentinker_env_host_steps_total", environment="counter") == 1
    assert page.value("opentinker_env_host_environment_episodes", environment="counter") == 1
    assert page.value("opentinker_env_host_workers", environment="counter") == 1
    assert 0 < page.value("opentinker_env_host_environment_seconds_total", environment="counter") < 1
    method = "env.v1.EnvHostService/Step"
    assert page.value("opentinker_rpc_seconds_count", method=method, reason="OK") == 2
