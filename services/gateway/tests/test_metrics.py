"""What the gateway shows to Prometheus."""

import asyncio

import pytest
from services.gateway.tests.conftest import World

from opentinker_kit.testing.metrics import scrape


@pytest.mark.parametrize("world", [{"metrics_port": 0}], indirect=True)
async def test_requests_by_route_and_status(world: World) -> None:
    async with world.http() as http:
        for path in ("/health/live", "/v1/models", "/v1/models", "/made/up/1", "/made/up/2"):
            await http.get(path)
    async with world.http(key="wrong") as http:
        await http.get("/v1/models")
    server = world.gateway.server
    page = await asyncio.to_thread(scrape, server.metrics_port)
    count = "opentinker_gateway_request_seconds_count"
    assert page.value(count, method="GET", route="/v1/models", status="200") == 2
    assert page.value(count, method="GET", route="/v1/models", status="401") == 1
    assert page.value(count, method="GET", route="/health/live", status="200") == 1
    assert page.value(count, method="GET", route="other", status="404") == 2
    assert page.value("opentinker_gateway_requests") == 0
