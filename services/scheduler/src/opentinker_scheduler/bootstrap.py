"""Builds the scheduler out of its parts, starts it in order, and ends it."""

import asyncio
import contextlib
import importlib.metadata
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any

import grpc.aio
import structlog

from opentinker_kit.auth import AuthPolicy
from opentinker_kit.clock import Clock, SteadyClock, SystemClock
from opentinker_kit.errors import ServiceError
from opentinker_kit.events import EventBus, NatsEventBus, NullEventBus, OutboxRelay, OutboxRow
from opentinker_kit.files import make_key_file
from opentinker_kit.interceptors import EndedCall
from opentinker_kit.job_tokens import TokenSigner
from opentinker_kit.objects import ObjectStore, S3ObjectStore
from opentinker_kit.server import KitServer, build_server
from opentinker_kit.settings import read_secret
from opentinker_scheduler.access import SERVICES, access_table, is_audited
from opentinker_scheduler.adapters.metrics import SchedulerMetrics
from opentinker_scheduler.adapters.models import DiskModels, ServedModels
from opentinker_scheduler.adapters.sql.database import Committed, SqlDatabase
from opentinker_scheduler.application.accounts import Accounts, KeyRing
from opentinker_scheduler.application.answers import Answers
from opentinker_scheduler.application.audit import AuditLog
from opentinker_scheduler.application.blobs import Blobs
from opentinker_scheduler.application.catalog import Catalog
from opentinker_scheduler.application.cluster import Cluster
from opentinker_scheduler.application.deployments import Deployments
from opentinker_scheduler.application.exports import Exports
from opentinker_scheduler.application.jobs import Jobs
from opentinker_scheduler.application.leases import Leases
from opentinker_scheduler.application.logs import Logs
from opentinker_scheduler.application.placing import Placing, Terms
from opentinker_scheduler.application.reconciler import Reconciler
from opentinker_scheduler.application.registry import Registry
from opentinker_scheduler.application.resolution import Resolution
from opentinker_scheduler.application.retention import Retention
from opentinker_scheduler.application.runs import Runs
from opentinker_scheduler.application.sessions import Sessions
from opentinker_scheduler.application.targets import Targets
from opentinker_scheduler.application.timers import Timing
from opentinker_scheduler.application.tokens import JobTokens
from opentinker_scheduler.application.usage import Usage
from opentinker_scheduler.application.warm import warm_servers
from opentinker_scheduler.application.watch import JobWatchers
from opentinker_scheduler.dependencies import look_at_dependencies
from opentinker_scheduler.launcher_ports import Launcher
from opentinker_scheduler.launching import make_launcher
from opentinker_scheduler.leadership import Leadership
from opentinker_scheduler.ports import Database, ModelSource, Transaction
from opentinker_scheduler.replica_ports import LeadershipLost, Replica
from opentinker_scheduler.servicers.accounts import AccountServicer
from opentinker_scheduler.servicers.catalog import CatalogServicer
from opentinker_scheduler.servicers.jobs import SchedulerServicer
from opentinker_scheduler.servicers.registry import ServerRegistryServicer
from opentinker_scheduler.servicers.runs import BlobServicer, RunServicer
from opentinker_scheduler.settings import SchedulerSettings
from opentinker_scheduler.wire.accounts import resource_of
from opentinkerapi.catalog.v1 import catalog_service_pb2_grpc
from opentinkerapi.run.v1 import blob_service_pb2_grpc, run_service_pb2_grpc
from opentinkerapi.scheduler.v1 import (
    account_service_pb2_grpc,
    scheduler_service_pb2_grpc,
    server_registry_service_pb2_grpc,
)

log = structlog.get_logger()

_FORGET_EVERY_S = 600.0
_STOP_RESERVE_S = 4.0


class SqlOutboxSource:
    """The outbox table, for the relay."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def pending(self, limit: int) -> Sequence[OutboxRow]:
        return await self._database.run(lambda tx: tx.outbox.pending(limit))

    async def mark_sent(self, row_ids: Sequence[int]) -> None:
        await self._database.run(lambda tx: tx.outbox.delete(row_ids))


class Scheduler:
    """The whole service. Build it with other parts to test it."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        clock: Clock | None = None,
        bus: EventBus | None = None,
        store: ObjectStore | None = None,
        models: ModelSource | None = None,
        launcher: Launcher | None = None,
        auth: AuthPolicy | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock or SteadyClock()
        self._offer = settings.offer()
        self._bus = bus or _event_bus(settings)
        self._store = store or (S3ObjectStore(settings.s3) if settings.s3 is not None else None)
        self._failed: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.database = SqlDatabase(settings.database(), self._committed)
        self._models = models or _models(settings, self.database)
        self._leases = Leases(self._clock, settings.server_lease_s)
        self._retention = Retention(self._clock, grace=timedelta(seconds=settings.deletion_grace_s))
        self._sessions = Sessions()
        self._watchers = JobWatchers(self.database)
        # By the machine's clock, which is what other servers have to tell that a token is old.
        self._tokens = JobTokens(TokenSigner(_token_secret(settings)), clock or SystemClock())
        self._keys = KeyRing(self.database, self._clock)
        self._audit = AuditLog(
            self.database,
            self._clock,
            keep=timedelta(days=settings.audit_keep_days),
            most=settings.audit_max_entries,
        )
        self._usage = Usage(self.database, self._clock)
        self._relay = OutboxRelay(SqlOutboxSource(self.database), self._bus)
        self.launcher = launcher or self._launcher()
        self._placing = Placing(_terms(settings, self.launcher))
        self._logs = Logs(self.database, self.launcher)
        self.reconciler = Reconciler(
            self.database,
            self.launcher,
            self._leases,
            self._sessions,
            self._placing,
            _timing(settings),
            self._clock,
        )
        self._registry = Registry(
            self.database,
            self._leases,
            self._sessions,
            settings.crash_budget(),
            self._clock,
            self.reconciler.wake,
            self._usage,
        )
        self.server: KitServer = build_server(
            settings,
            self._add_servicers,
            service_names=[service.full_name for service in SERVICES],
            auth=auth
            or AuthPolicy(settings.bootstrap_key(), settings.service_key(), access_table(), keys=self._keys),
            on_drain=self._drain,
            observer=self._ended,
        )

        if settings.metrics_port is not None:
            self.reconciler.watcher = SchedulerMetrics(self.server.metrics).tick

    async def start(self, *, install_signals: bool = False) -> int:
        """Listen, migrate the database, take over what runs, serve. Returns the port.

        While another scheduler leads the database it stands by: NOT_SERVING, and every call is told who does.
        """
        # The nodes of Ray are known once it is connected to.
        nodes_are_known = self._settings.launcher != "ray"
        if nodes_are_known:
            await self._look_at_warm_servers()
        port = await self.server.start(install_signals=install_signals)
        if not await self._take_the_lead():
            return port
        self._cluster.name = self.database.cluster
        self._leases.begin()
        await self.reconciler.adopt()
        if not nodes_are_known:
            await self._look_at_warm_servers()
        loop = asyncio.get_running_loop()
        for name, work in (
            ("reconciler", self._lead(self.reconciler.run())),
            ("leadership", self._lead(Leadership(self.database, self._sessions, self.server).keep())),
            ("outbox", self._relay.run()),
            ("audit", self._audit.run()),
            ("usage", self._usage.run()),
            ("forget", self._forget()),
            ("sweep", self._sweep()),
            ("dependencies", look_at_dependencies(self.server, self._bus, self._store, self._clock)),
            ("token key", asyncio.to_thread(self._tokens.prepare)),
        ):
            self._tasks.append(loop.create_task(work, name=name))
        await self.server.set_serving(True)
        return port

    async def _look_at_warm_servers(self) -> None:
        warm = [(one.spec(), one.count) for one in self._settings.warm_servers]
        self._placing.warm = await warm_servers(warm, self._offer.on(self.launcher.nodes()), self._models)

    async def run(self) -> None:
        """Serve until told to stop; raises what made it stop by itself."""
        await self.server.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(ServiceError):
            await self._audit.flush()
            await self._usage.take_in()
        await self._bus.close()
        await self.database.close()
        if self._failed is not None:
            raise self._failed

    def _add_servicers(self, server: grpc.aio.Server) -> None:
        settings, database = self._settings, self.database
        answers = Answers(database, self._clock)
        jobs = Jobs(
            self._offer,
            self._models,
            self._leases,
            self._tokens,
            self._clock,
            settings.job_lease_s,
            settings.tenant_rules(),
            settings.job_max_duration_s,
            self.launcher.nodes,
        )
        self._cluster = Cluster(
            database,
            self._offer,
            self._models,
            version=importlib.metadata.version("opentinker-scheduler"),
            env_host_address=settings.env_host_address,
            gateway_address=settings.gateway_address,
        )
        blobs = Blobs(
            database,
            self._store,
            self._clock,
            max_bytes=settings.max_blob_bytes,
            expires_s=settings.presign_s,
        )
        catalog = Catalog(self._clock, self._retention)
        targets = Targets(catalog, self._models)
        deployments = Deployments(database, targets, jobs, self._clock)
        resolution = Resolution(database, deployments, targets, jobs)
        exports = Exports(database, catalog, self._store, expires_s=settings.presign_s)
        scheduler_service_pb2_grpc.add_SchedulerServiceServicer_to_server(
            SchedulerServicer(
                database,
                answers,
                jobs,
                self._watchers,
                self._cluster,
                self._registry,
                self._leases,
                self._logs,
                self._clock,
                self.reconciler.wake,
                settings.prices(),
            ),
            server,
        )
        server_registry_service_pb2_grpc.add_ServerRegistryServiceServicer_to_server(
            ServerRegistryServicer(self._registry, self._leases), server
        )
        account_service_pb2_grpc.add_AccountServiceServicer_to_server(
            AccountServicer(
                *(database, answers, Accounts(self._clock), self._keys, self._tokens, self._audit),
                *(self._usage, settings.prices()),
            ),
            server,
        )
        catalog_service_pb2_grpc.add_CatalogServiceServicer_to_server(
            CatalogServicer(database, answers, catalog, exports, deployments, resolution, jobs), server
        )
        run_service_pb2_grpc.add_RunServiceServicer_to_server(
            RunServicer(database, answers, Runs(self._store, self._clock)), server
        )
        blob_service_pb2_grpc.add_BlobServiceServicer_to_server(BlobServicer(blobs), server)

    def _launcher(self) -> Launcher:
        return make_launcher(
            self._settings,
            lambda: self.server.address,
            lambda: self.database.cluster,
            lambda server_id, code: self.reconciler.exited(server_id, code),
        )

    def _ended(self, call: EndedCall) -> None:
        if is_audited(call):
            resource = resource_of(call.request, call.response)
            self._audit.add(call.principal, call.method, resource, call.outcome, call.peer)

    def _committed(self, change: Committed) -> None:
        self._watchers.changed(change.jobs | change.told)
        if change.jobs:
            self.reconciler.wake()
        if change.facts:
            self._relay.nudge()

    async def _take_the_lead(self) -> bool:
        """Open the database once this scheduler may lead it; False if it was told to stop before."""
        where = Replica(self._settings.replica_name(self.server.port), self.server.address)
        opening = asyncio.create_task(self.database.open(self._clock.now(), where))
        stopping = asyncio.create_task(self.server.wait())
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        leads = opening.done()
        for task in (opening, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await opening
        return leads

    async def _lead(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except LeadershipLost as error:
            log.error("another scheduler leads this database; stopping", error=str(error))
            self._failed = error
            self.server.request_drain()

    async def _drain(self) -> None:
        self._watchers.close()
        self._logs.close()
        for task in self._tasks:
            if task.get_name() == "reconciler":
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._tasks and self._failed is None:
            settings = self._settings
            # Servers that do not end by themselves must be ended before this process is.
            grace_s = min(settings.stop_grace_s, max(0.5, settings.drain_s - _STOP_RESERVE_S))
            await self.reconciler.stop(stop_servers=settings.stop_servers_on_exit, grace_s=grace_s)
        self._sessions.close()

    async def _forget(self) -> None:
        """Drop answers and audit entries whose time is over."""
        while True:
            with contextlib.suppress(ServiceError):
                await self.database.run(self._forget_answers)
                await self.database.run(self._audit.forget)
                await self.database.run(self._usage.forget)
            await self._clock.sleep(_FORGET_EVERY_S)

    async def _sweep(self) -> None:
        """Let checkpoints go whose time is over, and delete objects that nothing names any more."""
        while True:
            await self._clock.sleep(self._settings.sweep_every_s)
            if self._store is not None:
                try:
                    await self._retention.sweep(self.database, self._store)
                except ServiceError as error:
                    log.info("old objects stay for now", error=str(error))

    def _forget_answers(self, tx: Transaction) -> None:
        tx.requests.forget_before(self._clock.now() - timedelta(seconds=self._settings.request_memory_s))


def _event_bus(settings: SchedulerSettings) -> EventBus:
    if not settings.nats_url:
        return NullEventBus()
    return NatsEventBus(settings.nats_url, settings.nats_token())


def _models(settings: SchedulerSettings, database: Database) -> ModelSource:
    if settings.launcher == "static":
        return ServedModels(database)
    return DiskModels(settings.model_roots, settings.model_cache_dir, settings.allow_any_model_dir)


def _terms(settings: SchedulerSettings, launcher: Launcher) -> Terms:
    return Terms(
        limits=settings.limits(),
        tenants=settings.tenant_rules(),
        budget=settings.crash_budget(),
        launcher_name=launcher.name,
        preemption=settings.preemption,
        preempt_after_s=settings.preempt_after_s,
    )


def _timing(settings: SchedulerSettings) -> Timing:
    return Timing(
        tick_s=settings.tick_s,
        register_s=settings.register_timeout_s,
        ready_s=settings.ready_timeout_s,
        release_s=settings.release_timeout_s,
        idle_s=settings.idle_stop_s,
        stop_grace_s=settings.stop_grace_s,
    )


def _token_secret(settings: SchedulerSettings) -> str:
    """What job tokens are signed with; made at the first start."""
    path = settings.job_token_key_file or settings.state_dir / "job_tokens.key"
    return read_secret(make_key_file(path))
