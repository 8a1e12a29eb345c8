"""Builds a trainer from its settings, and runs it. Tests give their own objects, bus, clock and engines."""

import asyncio
import hashlib
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import structlog

from opentinker_kit.accounts import gate
from opentinker_kit.clock import Clock, SystemClock
from opentinker_kit.errors import ServiceError
from opentinker_kit.events import EventBus, NatsEventBus, NullEventBus
from opentinker_kit.job_tokens import TRAINER
from opentinker_kit.metering import TokenMeter
from opentinker_kit.models import image_settings, resolve_model, tokenizer_files
from opentinker_kit.objects import ObjectStore, S3ObjectStore
from opentinker_kit.registration import Announcement, Assignment, Registration
from opentinker_kit.server import KitServer, build_server
from opentinker_kit.tokenizer_files import TokenizerFiles
from opentinker_trainer.adapters.catalog import GrpcCatalog, NoCatalog
from opentinker_trainer.adapters.engine_process import ProcessEngine
from opentinker_trainer.adapters.metrics import TrainerMetrics
from opentinker_trainer.application.admission import Admission, ByteBudget
from opentinker_trainer.application.dispatcher import Dispatcher
from opentinker_trainer.application.engine_host import EngineHost
from opentinker_trainer.application.executor import Executor
from opentinker_trainer.application.holdings import Holdings
from opentinker_trainer.application.patience import patiently
from opentinker_trainer.application.publishing import Publisher
from opentinker_trainer.application.recovery import Recovery
from opentinker_trainer.application.store import PolicyStore
from opentinker_trainer.application.trainer import Base, Trainer
from opentinker_trainer.domain.samples import Limits
from opentinker_trainer.ports import Engine, ModelInfo
from opentinker_trainer.servicer import ACCESS, SERVICE, TrainerServicer
from opentinker_trainer.settings import TrainerSettings
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.trainer.v1 import trainer_service_pb2_grpc

log = structlog.get_logger()

_FAILURE_SHOWN_S = 30.0
"""How long a trainer that cannot load stays, so that the scheduler hears why."""


class TrainerServer:
    """A whole trainer: the front, and the engine it keeps."""

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        objects: ObjectStore | None = None,
        bus: EventBus | None = None,
        clock: Clock | None = None,
        make_engine: Callable[[], Engine] | None = None,
    ) -> None:
        """`make_engine` replaces the engine that the settings name. ValueError if the settings lack s3."""
        self._settings = settings
        self._clock = clock or SystemClock()
        self._objects = objects or _objects(settings)
        self._bus = bus or _bus(settings)
        self._model_path = Path()
        self._tasks: list[asyncio.Task[None]] = []
        self._registration: Registration | None = None
        self._failed: ServiceError | None = None
        managed = bool(settings.scheduler_address or settings.scheduler_address_file)
        self._base = Base(settings.base_model, "", settings.max_lora_rank, 0)
        self.host = EngineHost(make_engine or self._make_engine, self._clock)
        self.holdings = Holdings(managed=managed, holds_lease=self._holds_lease)
        self.catalog = (
            GrpcCatalog(
                settings.resolve_scheduler_address,
                settings.service_key(),
                self._server_name,
                tls=settings.peer_files(),
            )
            if managed
            else NoCatalog()
        )
        self._gate = gate(settings, ACCESS, TRAINER, self._clock)
        self._build()
        self.server: KitServer = build_server(
            settings,
            lambda server: trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(
                self.servicer, server
            ),
            service_names=[SERVICE],
            auth=self._gate.auth,
            on_drain=self._drain,
        )
        self.dispatcher.watcher = TrainerMetrics(self.server.metrics, self.holdings).ended

    def _build(self) -> None:
        settings, clock = self._settings, self._clock
        state_dir = settings.state_dir.absolute()
        store = PolicyStore(self._objects)
        publisher = Publisher(
            store,
            self.catalog,
            self._bus,
            clock,
            publish_dir=settings.publish_dir or state_dir / "versions",
            keep=settings.keep_published,
            keep_models=settings.keep_model_versions,
            upload_first=settings.upload_before_register,
            source=settings.instance_id or "trainer",
        )
        executor = self._executor = Executor(
            store,
            self.catalog,
            publisher,
            clock,
            state_dir / "scratch",
            keep_checkpoints=settings.keep_checkpoints,
            checkpoint_ttl_s=settings.checkpoint_ttl_s,
        )
        recovery = Recovery(store, executor, clock, state_dir / "recovery")
        self._meter = TokenMeter()
        self.dispatcher = Dispatcher(
            self.host,
            self.holdings,
            executor,
            recovery,
            store,
            clock,
            recovery_every_steps=settings.recovery_every_steps,
            meter=self._meter,
        )
        self.trainer = Trainer(
            self._base,
            self.host,
            self.holdings,
            self.dispatcher,
            executor,
            recovery,
            publisher,
            store,
            self.catalog,
            clock,
            held_file=state_dir / "held_policies.json",
        )
        self.admission = Admission(
            self.holdings, store, recovery, clock, gap_timeout_s=settings.gap_timeout_s
        )
        self.servicer = TrainerServicer(
            self.trainer,
            self.admission,
            self.holdings,
            self._gate,
            engine=settings.engine,
            dtype=settings.forward_dtype or settings.dtype,
            ranks=settings.ranks,
            budget=ByteBudget(settings.max_pending_bytes),
            max_operation_bytes=settings.max_operation_bytes,
        )

    async def start(self, *, install_signals: bool = False) -> int:
        """Listen, and load in the background; returns the bound port."""
        if isinstance(self._bus, NatsEventBus):
            self._bus.start()
        port = await self.server.start(install_signals=install_signals)
        self._begin("load", self._load())
        return port

    async def run(self) -> None:
        """Serve until told to stop. ServiceError if the engine cannot be started."""
        await self.server.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.host.close()
        await self.catalog.close()
        await self._gate.close()
        await self._bus.close()
        if self._failed is not None:
            raise self._failed

    async def _load(self) -> None:
        try:
            if isinstance(self._objects, S3ObjectStore):
                await patiently(self._clock, self._objects.ensure_bucket)
            digest = await self._resolve()
            self._register(digest)
            engine = await self.host.engine()
        except ServiceError as error:
            await self._give_up(error)
            return
        model = self.host.model
        assert model is not None
        self._base = self.trainer.base = Base(
            self._settings.base_model,
            digest,
            self._settings.max_lora_rank,
            self._settings.memory_limit_bytes or self._free_bytes(model) // 2,
            forward_bytes=self._settings.weight_bytes(),
            ranks=self._settings.ranks,
        )
        self.admission.limits = self._limits(model)
        self._begin("dispatcher", self._dispatch())
        self._begin("gaps", self.admission.expire_gaps())
        self._begin("announce", self.trainer.announce())
        if not self.holdings.managed:
            await self.trainer.restore_held()
        await self.server.set_serving(True)
        if self._registration is not None:
            self._registration.set_ready()
        pid = engine.pid if isinstance(engine, ProcessEngine) else None
        log.info("ready", base_model=self._settings.base_model, engine=self._settings.engine, engine_pid=pid)

    async def _dispatch(self) -> None:
        try:
            await self.dispatcher.run()
        except ServiceError as error:
            await self._give_up(error)

    async def _resolve(self) -> str:
        """Find the base model; its digest."""
        settings = self._settings
        if settings.engine == "noop":
            return hashlib.sha256(f"noop {settings.base_model}".encode()).hexdigest()
        resolved = await asyncio.to_thread(
            resolve_model,
            settings.base_model,
            model_roots=settings.model_roots,
            cache_dir=settings.model_cache_dir,
            allow_any_dir=settings.allow_any_model_dir,
        )
        self._model_path = self._executor.model_dir = resolved.path
        self.servicer.tokenizer = TokenizerFiles(tokenizer_files(resolved.path))
        return resolved.digest

    def _free_bytes(self, model: ModelInfo) -> int:
        """Of one engine process."""
        return model.free_bytes or psutil.virtual_memory().available // self._settings.ranks

    def _limits(self, model: ModelInfo) -> Limits:
        wanted = self._settings.context_tokens or model.context_tokens
        images = None if self._settings.engine == "noop" else image_settings(self._model_path)
        return Limits(model.vocab_size, min(wanted, model.context_tokens), images)

    def _make_engine(self) -> Engine:
        return ProcessEngine(
            self._settings.engine,
            self._settings.load_request(self._model_path),
            log_path=self._settings.state_dir / "engine.log",
            lifeline_fd=self._settings.lifeline_fd,
            more_env=self._settings.engine_env(),
        )

    def _register(self, digest: str) -> None:
        if not self.holdings.managed or self._registration is not None:
            return
        settings = self._settings
        announcement = Announcement(
            role=job_pb2.SLOT_ROLE_TRAINER,
            base_model=settings.base_model,
            base_digest=digest,
            options=job_pb2.ServerOptions(
                engine=settings.engine,
                dtype=settings.dtype,
                max_lora_rank=settings.max_lora_rank,
                context_tokens=settings.context_tokens,
                ranks=settings.ranks,
                accelerator=settings.accelerator,
            ),
            slots=settings.slots,
            advertise_address=self.server.address,
            pid=os.getpid(),
            server_id=settings.server_id,
        )
        if settings.instance_id:
            announcement.instance_id = settings.instance_id
        self._registration = Registration(
            settings,
            announcement,
            _Handler(self.trainer, self.holdings, self.server),
            on_lost=self.server.request_drain,
            lost_after_s=settings.scheduler_loss_s,
            meter=self._meter,
        )
        self._registration.start()

    async def _give_up(self, error: ServiceError) -> None:
        """Say why this trainer cannot work, to the scheduler and to whoever reads the log, and end."""
        log.error("the trainer cannot work", reason=error.reason, error=error.message)
        self._failed = error
        if self.holdings.managed:
            self._register("")
            assert self._registration is not None
            self._registration.set_failed(f"{error.reason}: {error.message}")
            await self._clock.sleep(_FAILURE_SHOWN_S)
        self.server.request_drain()

    async def _drain(self) -> None:
        self.holdings.drain()
        await self.trainer.save_all()
        if self._registration is not None:
            await self._registration.stop()

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # Without one of its loops a trainer would only look alive.
            log.error("a background task failed", task=task.get_name(), exc_info=error)
            self._failed = ServiceError(Reason.INTERNAL, f"task {task.get_name()} failed: {error}")
            self.server.request_drain()

    def _holds_lease(self) -> bool:
        return self._registration is not None and self._registration.holds_lease()

    def _server_name(self) -> str:
        return self._registration.server if self._registration is not None else ""


class _Handler:
    """What the scheduler pushes, passed on."""

    def __init__(self, trainer: Trainer, holdings: Holdings, server: KitServer) -> None:
        self._trainer = trainer
        self._holdings = holdings
        self._server = server

    async def assign(self, assignment: Assignment) -> None:
        await self._trainer.assign(
            assignment.assignment, assignment.job, assignment.attempt, assignment.policies
        )

    async def release(self, assignment: str, job: str) -> None:
        await self._trainer.release(assignment, job)

    def request_drain(self, reason: str) -> None:
        log.info("asked to end", reason=reason)
        self._server.request_drain()

    def load(self) -> job_pb2.ServerLoad:
        running = sum(policy.queue.running is not None for policy in self._holdings)
        waiting = sum(policy.queue.contiguous - policy.queue.ended_seq for policy in self._holdings)
        return job_pb2.ServerLoad(
            running_requests=running,
            queued_requests=waiting - running,
            memory_bytes=psutil.Process().memory_info().rss,
        )


def _objects(settings: TrainerSettings) -> ObjectStore:
    if settings.s3 is None:
        raise ValueError("a trainer needs an object store: set s3 (endpoint, access_key, secret_key_file)")
    return S3ObjectStore(settings.s3)


def _bus(settings: TrainerSettings) -> EventBus:
    return NatsEventBus(settings.nats_url, settings.nats_token()) if settings.nats_url else NullEventBus()
