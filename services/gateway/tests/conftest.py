"""A real gateway over HTTP, with doubles behind it, and OpenAI's own client in front of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from services.gateway.tests.doubles import KEY, Inference, Scheduler, serve_doubles
from services.gateway.tests.tokenizers import CHATML, files

from opentinker_gateway.bootstrap import Gateway, build
from opentinker_gateway.settings import GatewaySettings
from opentinker_kit.files import write_atomic


@dataclass
class World:
    """All of it."""

    url: str
    gateway: Gateway
    scheduler: Scheduler
    inference: Inference

    def client(self, key: str = KEY, base: str = "/v1", **options: object) -> openai.AsyncOpenAI:
        """OpenAI's client, without retries unless asked for."""
        return openai.AsyncOpenAI(
            base_url=self.url + base,
            api_key=key,
            # Certificates that plain HTTP has no use for take longer to load than most tests to run.
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
            **{"max_retries": 0, "timeout": 60.0, **options},  # type: ignore[arg-type]
        )

    def http(self, key: str = KEY) -> httpx.AsyncClient:
        """A bare client with the key."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"},
            timeout=60.0,
            trust_env=False,
            verify=False,
        )

    def use_template(self, template: str) -> None:
        """Another chat template from now on."""
        self.inference.files = files(template)
        self.inference.__post_init__()
        self.gateway.models._capabilities.clear()


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, object]:
    """Settings of the gateway; tests may add some."""
    return gateway_settings(tmp_path)


def gateway_settings(tmp_path: Path) -> dict[str, object]:
    """Settings of a gateway whose files are in a folder."""
    for name, secret in (("bootstrap", KEY), ("service", "service-key")):
        write_atomic(tmp_path / f"{name}.key", secret, mode=0o600)
    return {
        "bootstrap_key_file": tmp_path / "bootstrap.key",
        "service_key_file": tmp_path / "service.key",
        "state_dir": tmp_path,
        "drain_s": 1.0,
    }


@pytest.fixture
async def world(settings: dict[str, object], request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A gateway that serves; `@pytest.mark.parametrize("world", [{...}], indirect=True)` adds settings."""
    async with serving({**settings, **getattr(request, "param", {})}) as served:
        yield served


@asynccontextmanager
async def serving(settings: dict[str, object]) -> AsyncIterator[World]:
    """A gateway with these settings, and doubles behind it."""
    scheduler, inference = Scheduler(), Inference(files(CHATML))
    server, address = await serve_doubles(scheduler, inference)
    gateway = build(GatewaySettings(scheduler_address=address, **settings))  # type: ignore[arg-type]
    port = await gateway.start()
    try:
        yield World(f"http://127.0.0.1:{port}", gateway, scheduler, inference)
    finally:
        gateway.server.request_drain()
        await gateway.server.wait()
        await gateway.stop()
        await server.stop(grace=0)
