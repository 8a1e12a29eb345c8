"""Builds the gateway from its settings; fakes come in by argument."""

import asyncio
import contextlib
from dataclasses import dataclass

from opentinker_gateway.adapters.models import Limits, SchedulerModels
from opentinker_gateway.app import build_app
from opentinker_gateway.server import HttpServer
from opentinker_gateway.settings import GatewaySettings
from opentinker_kit.accounts import RemoteAccounts
from opentinker_kit.clock import Clock, SystemClock


@dataclass(frozen=True, slots=True)
class Gateway:
    """A built gateway: `start`, then `serve` until it is told to stop, then `stop`."""

    server: HttpServer
    models: SchedulerModels
    accounts: RemoteAccounts

    async def start(self, *, install_signals: bool = False) -> int:
        """Listen; returns the port."""
        return await self.server.start(install_signals=install_signals)

    async def serve(self) -> None:
        """Serve until the server is told to stop."""
        keeper = asyncio.create_task(self.models.keep_for_ever(), name="keeper")
        try:
            await self.server.wait()
        finally:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper

    async def stop(self) -> None:
        """End the gateway's jobs and close its channels."""
        await self.models.close()
        await self.accounts.close()


def build(settings: GatewaySettings, *, clock: Clock | None = None) -> Gateway:
    """Everything, wired and not yet started."""
    clock = clock or SystemClock()
    limits = Limits(
        start_s=settings.model_start_s,
        idle_s=settings.on_demand_idle_s,
        on_demand_jobs=settings.on_demand_jobs,
    )
    locate, tls = settings.resolve_scheduler_address, settings.peer_files()
    models = SchedulerModels(locate, clock, limits, tls=tls)
    accounts = RemoteAccounts(locate, settings.service_key(), clock, tls=tls)
    return Gateway(HttpServer(settings, build_app(settings, models, clock, accounts)), models, accounts)


async def run(settings: GatewaySettings) -> None:
    """Serve until told to stop."""
    gateway = build(settings)
    try:
        await gateway.start(install_signals=True)
        await gateway.serve()
    finally:
        await gateway.stop()
