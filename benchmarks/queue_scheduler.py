"""The real scheduler for `scheduler`, with a launcher that starts nothing: it says on stdout what it would.

Lines out: `{"port": ...}`, `{"start": ...}` for each server, `{"stop": ...}`, `{"ticks": ...}` when a line
`ticks` comes in. It ends with its stdin. Projects are told apart by metadata: keys of tenants are not what is
measured here.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.queue_cloud import PROJECT
from opentinker_kit.auth import AuthPolicy, Kind, Principal
from opentinker_kit.logging import configure_logging
from opentinker_scheduler.access import access_table
from opentinker_scheduler.bootstrap import Scheduler
from opentinker_scheduler.domain.admission import Model
from opentinker_scheduler.domain.model import Server
from opentinker_scheduler.domain.nodes import Node
from opentinker_scheduler.garbage import collect_seldom
from opentinker_scheduler.launcher_ports import Started
from opentinker_scheduler.log_ports import LogPart
from opentinker_scheduler.settings import SchedulerSettings, TenantSettings


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class SayingLauncher:
    """See `launcher_ports.Launcher`."""

    name = "saying"
    can_launch = True

    def __init__(self) -> None:
        self._started: dict[str, Started] = {}

    async def start(self, server: Server) -> Started:
        if server.id not in self._started:
            self._started[server.id] = Started(os.getpid(), time.time(), Path("none"))
            say(start=server.id, model=server.base_model, slots=server.slots_total)
        return self._started[server.id]

    async def adopt(self, servers: Sequence[Server]) -> Mapping[str, Started]:
        return {}

    async def stop(self, server_id: str, grace_s: float) -> None:
        if self._started.pop(server_id, None) is not None:
            say(stop=server_id)

    def nodes(self) -> Sequence[Node]:
        return ()

    def waits(self) -> Mapping[str, str]:
        return {}

    def watched(self) -> Collection[str]:
        return tuple(self._started)

    def log_tail(self, server_id: str) -> str:
        return ""

    async def read_log(self, server_id: str, offset: int, limit: int) -> LogPart | None:
        return None

    def close(self) -> None:
        """Nothing runs."""


class AnyModel:
    """See `ports.ModelSource`."""

    async def resolve(self, model_id: str, field: str) -> Model:
        return Model(model_id, 2048)

    async def known(self) -> Sequence[str]:
        return ()


class ByMetadata(AuthPolicy):
    """The usual keys, and a project for each caller."""

    async def identify(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Principal:
        pairs = list(metadata)
        principal = await super().identify(method, pairs)
        project = dict(pairs).get(PROJECT)
        if principal.kind is Kind.CALLER and isinstance(project, str):
            return replace(principal, project=project)
        return principal


async def serve(folder: Path, servers: int, slots: int, reserve_after_s: float) -> None:
    settings = SchedulerSettings(
        state_dir=folder,
        bootstrap_key_file=folder / "bootstrap.key",
        service_key_file=folder / "service.key",
        max_servers=servers,
        trainer_slots=slots,
        default_tenant=TenantSettings(max_jobs=None),
        job_lease_s=24 * 3600.0,
        reserve_after_s=reserve_after_s,
        idle_stop_s=3600.0,
        stop_servers_on_exit=False,
        log_level="warning",
    )
    configure_logging(settings, "scheduler")
    auth = ByMetadata(settings.bootstrap_key(), settings.service_key(), access_table())
    scheduler = Scheduler(settings, launcher=SayingLauncher(), models=AnyModel(), auth=auth)
    ticks: list[tuple[float, float]] = []
    _time_ticks(scheduler, ticks)
    port = await scheduler.start()
    say(port=port)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer
    )
    while line := (await lines.readline()).decode().strip():
        if line == "ticks":
            say(ticks=ticks)
            ticks.clear()
    await scheduler.server.drain()
    await scheduler.run()


def _time_ticks(scheduler: Scheduler, ticks: list[tuple[float, float]]) -> None:
    """Have each tick note when it was (on the clock of all processes) and how long it took."""
    reconciler = scheduler.reconciler
    tick = reconciler.tick

    async def timed() -> bool:
        began = time.perf_counter()
        moving = await tick()
        ticks.append((began, time.perf_counter() - began))
        return moving

    reconciler.tick = timed  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--servers", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--reserve-after-s", type=float, required=True)
    arguments = parser.parse_args()
    # As the scheduler's own entry does.
    collect_seldom()
    asyncio.run(serve(arguments.folder, arguments.servers, arguments.slots, arguments.reserve_after_s))


if __name__ == "__main__":
    main()
