"""Builds env_host from its settings; fakes come in by argument."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

import structlog

from opentinker_env_host.adapters.failures import BusFailureSink
from opentinker_env_host.adapters.journal import FileJournal
from opentinker_env_host.adapters.metrics import CountedFailures, show
from opentinker_env_host.adapters.package_builder import PackageBuilder
from opentinker_env_host.adapters.package_store import PackageStore
from opentinker_env_host.adapters.prober import ProcessProber
from opentinker_env_host.adapters.sandbox_probe import SandboxProbe
from opentinker_env_host.adapters.worker_process import ProcessLauncher, WorkerProgram
from opentinker_env_host.domain.host import EnvironmentHost, HostLimits
from opentinker_env_host.domain.packages import Package
from opentinker_env_host.domain.pool import PoolLimits, WorkerPool
from opentinker_env_host.domain.registry import PackageQuotas, Registry
from opentinker_env_host.ports import WorkerLauncher
from opentinker_env_host.servicer import EnvHostServicer
from opentinker_env_host.settings import EnvHostSettings, EnvironmentSettings
from opentinker_kit.accounts import Gate, gate
from opentinker_kit.auth import Access
from opentinker_kit.clock import Clock, SystemClock
from opentinker_kit.events import EventBus, NatsEventBus, NullEventBus
from opentinker_kit.job_tokens import ENV_HOST
from opentinker_kit.server import KitServer, build_server
from opentinkerapi.env.v1 import env_host_service_pb2
from opentinkerapi.env.v1.env_host_service_pb2_grpc import add_EnvHostServiceServicer_to_server

log = structlog.get_logger()

_SERVICE = env_host_service_pb2.DESCRIPTOR.services_by_name["EnvHostService"]
_ACCESS: Mapping[str, Access] = {
    # What is asked about the host and its environments, for no job.
    "GetCapabilities": Access.CALLER,
    "ListEnvironments": Access.CALLER,
    "GetEnvironment": Access.CALLER,
    "ListTasks": Access.CALLER,
    # The project's uploads.
    "UploadPackage": Access.MEMBER,
    "ListEnvironmentVersions": Access.CALLER,
    "GetEnvironmentVersion": Access.CALLER,
    "DeleteEnvironmentVersion": Access.MEMBER,
    "GetEnvironmentLog": Access.CALLER,
    "ProbeEnvironment": Access.MEMBER,
}
METHODS: Mapping[str, Access] = {
    f"/{_SERVICE.full_name}/{method.name}": _ACCESS.get(method.name, Access.JOB)
    for method in _SERVICE.methods
}
_REST_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class EnvHost:
    """A built env_host: `start`, then `serve` until it is told to stop, then `stop`."""

    server: KitServer
    host: EnvironmentHost
    registry: Registry
    bus: EventBus
    gate: Gate

    async def start(self, *, install_signals: bool = False) -> int:
        """Listen, start the first workers, turn SERVING; returns the port."""
        port = await self.server.start(install_signals=install_signals)
        await self.registry.load()
        await self.host.start()
        await self.server.set_serving(True)
        return port

    async def serve(self) -> None:
        """Serve until the server is told to stop."""
        tasks = [
            asyncio.create_task(self.host.reap_forever(), name="reaper"),
            asyncio.create_task(self._rest_forever(), name="rest of packages"),
        ]
        try:
            await self.server.wait()
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """Kill the workers and close the bus."""
        await self.registry.stop()
        await self.host.stop()
        await self.bus.close()
        await self.gate.close()

    async def _rest_forever(self) -> None:
        while True:
            await asyncio.sleep(_REST_EVERY_S)
            self.registry.rest()


def build(
    settings: EnvHostSettings,
    *,
    clock: Clock | None = None,
    bus: EventBus | None = None,
    launchers: Mapping[str, WorkerLauncher] | None = None,
) -> EnvHost:
    """Everything, wired and not yet started."""
    clock = clock or SystemClock()
    bus = bus or _bus(settings)
    pools = {
        name: WorkerPool(
            name,
            launchers[name] if launchers is not None else ProcessLauncher(_program(settings, name, entry)),
            _limits(settings, entry),
        )
        for name, entry in settings.environments.items()
    }
    limits = HostLimits(
        settings.max_episodes, settings.max_group_size, settings.journal_steps, settings.max_project_episodes
    )
    source = f"env_host/{settings.instance_id}" if settings.instance_id else "env_host"
    failures = CountedFailures(BusFailureSink(bus, clock, source))
    journal = FileJournal(settings.state_dir / "episodes.journal")
    host = EnvironmentHost(pools, limits, clock, failures, journal)
    sandbox = SandboxProbe(settings.default_python)
    registry = _registry(settings, host, clock, sandbox)
    servicer = EnvHostServicer(host, registry, clock, sandbox)

    door = gate(settings, METHODS, ENV_HOST, clock)

    async def drain() -> None:
        host.draining = True
        servicer.end_streams()

    server = build_server(
        settings,
        lambda server: add_EnvHostServiceServicer_to_server(servicer, server),
        service_names=[_SERVICE.full_name],
        auth=door.auth,
        on_drain=drain,
    )
    show(server.metrics, host, failures)
    return EnvHost(server, host, registry, bus, door)


async def run(settings: EnvHostSettings) -> None:
    """Serve until told to stop."""
    env_host = build(settings)
    try:
        await env_host.start(install_signals=True)
        await env_host.serve()
    finally:
        await env_host.stop()


def _bus(settings: EnvHostSettings) -> EventBus:
    return NatsEventBus(settings.nats_url, settings.nats_token()) if settings.nats_url else NullEventBus()


def _registry(
    settings: EnvHostSettings, host: EnvironmentHost, clock: Clock, sandbox: SandboxProbe
) -> Registry:
    given = settings.packages
    workshop = PackageBuilder(settings, sandbox)

    def program(environment: str | Package) -> WorkerProgram:
        if isinstance(environment, Package):
            return workshop.program(environment)
        return _program(settings, environment, settings.environments[environment])

    def make_pool(package: Package, launcher: WorkerLauncher) -> WorkerPool:
        limits = _limits(settings, EnvironmentSettings(target="-", exclusive=package.spec.exclusive))
        if not package.spec.exclusive:
            limits = replace(limits, max_workers=given.max_workers)
        return WorkerPool(package.key, launcher, replace(limits, warm=0))

    quotas = PackageQuotas(
        enabled=given.enabled,
        archive_bytes=given.archive_bytes,
        project_versions=given.max_project_versions,
        project_bytes=given.max_project_bytes,
        idle_s=given.idle_s,
    )
    store = PackageStore(settings.state_dir / "packages")
    prober = ProcessProber(program, settings.probe_timeout_s)
    return Registry(host, store, workshop, prober, make_pool, quotas, clock)


def _program(settings: EnvHostSettings, name: str, entry: EnvironmentSettings) -> WorkerProgram:
    return WorkerProgram(
        environment=name,
        target=entry.target,
        path=entry.path,
        python=entry.python or settings.default_python,
        log_dir=settings.state_dir / "logs" / "workers",
        start_timeout_s=settings.start_timeout_s,
        threads=entry.threads,
        memory_bytes=settings.worker_memory_bytes,
    )


def _limits(settings: EnvHostSettings, entry: EnvironmentSettings) -> PoolLimits:
    return PoolLimits(
        warm=settings.warm_workers,
        max_workers=settings.max_exclusive_workers if entry.exclusive else settings.max_workers,
        episodes_per_worker=1 if entry.exclusive else settings.episodes_per_worker,
        recycle_episodes=1 if entry.exclusive else settings.recycle_episodes,
        recycle_bytes=settings.recycle_bytes,
        wait_s=settings.worker_wait_s,
    )
