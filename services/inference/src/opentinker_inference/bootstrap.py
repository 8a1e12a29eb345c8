"""Builds an inference server: model, engine child, store, service, registration. Fakes by argument."""

import asyncio
import contextlib
import os

import grpc.aio
import structlog

from opentinker_inference.adapters.engine_process import (
    CHILD,
    EngineClient,
    SupervisedEngine,
    engine_environment,
    vllm_runs_on_cpu,
)
from opentinker_inference.adapters.metrics import show
from opentinker_inference.adapters.tokenizer import ModelTokenizer
from opentinker_inference.adapters.version_store import ObjectVersionStore
from opentinker_inference.domain.service import InferenceDomain
from opentinker_inference.domain.versions import ModelRef
from opentinker_inference.ports import EngineConfig
from opentinker_inference.prompts import PromptReader
from opentinker_inference.servicer import ACCESS, SERVICE, InferenceServicer
from opentinker_inference.settings import InferenceSettings
from opentinker_kit.accounts import Gate, gate
from opentinker_kit.clock import SystemClock
from opentinker_kit.errors import ServiceError
from opentinker_kit.events import EventBus, NatsEventBus, NullEventBus
from opentinker_kit.frames import EngineProcess
from opentinker_kit.job_tokens import INFERENCE
from opentinker_kit.models import ResolvedModel, image_settings, resolve_model
from opentinker_kit.objects import ObjectStore, S3ObjectStore
from opentinker_kit.registration import Announcement, Assignment, Registration
from opentinker_kit.server import KitServer, build_server
from opentinkerapi.inference.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from opentinkerapi.scheduler.v1 import job_pb2

log = structlog.get_logger()

_REPORT_FAILURE_S = 5.0
"""How long a server that cannot start stays, so that the scheduler hears why."""


class InferenceServer:
    """A running server. `run` returns its exit status when it is told to stop, or cannot go on."""

    def __init__(
        self,
        settings: InferenceSettings,
        *,
        objects: ObjectStore | None = None,
        events: EventBus | None = None,
    ) -> None:
        self._settings = settings
        self._objects = objects or (S3ObjectStore(settings.s3) if settings.s3 else None)
        self._events = events or _event_bus(settings)
        self._registration: Registration | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.server: KitServer
        self.engine: SupervisedEngine
        self.domain: InferenceDomain
        self._store: ObjectVersionStore
        self._gate: Gate

    async def start(self, *, install_signals: bool = False) -> int:
        """Resolve the model, listen, begin to start the engine; returns the port. ServiceError if the model
        is unknown.
        """
        settings = self._settings
        model = await asyncio.to_thread(
            resolve_model,
            settings.base_model,
            model_roots=settings.model_roots,
            cache_dir=settings.model_cache_dir,
            allow_any_dir=settings.allow_any_model_dir,
        )
        tokenizer = ModelTokenizer(model.path)
        config = engine_config(settings, model)
        self.engine = SupervisedEngine(lambda: self._client(config))
        self._store = ObjectVersionStore(
            self._objects,
            settings.state_dir / "versions",
            model_dir=model.path,
            base_digest=model.digest,
            max_rank=settings.max_lora_rank,
            validate=settings.engine != "noop",
            serving_mode=config.serving_mode,
            # vLLM's adapter of an output layer dies of the prompt logprobs of two requests at once.
            adapts_output=(config.engine, config.serving_mode) != ("vllm", "adapter"),
        )
        await asyncio.to_thread(self._store.clean_up)
        self.domain = InferenceDomain(
            base_model=settings.base_model,
            end_token_ids=tokenizer.end_token_ids,
            engine=self.engine,
            store=self._store,
            clock=SystemClock(),
            max_pending=settings.max_pending_requests,
        )
        prompts = PromptReader(image_settings(model.path), self._objects, lambda: self.domain.info)
        self._gate = gate(settings, ACCESS, INFERENCE, SystemClock())
        servicer = InferenceServicer(
            self.domain, tokenizer, prompts, model.digest, settings.keep_alive_s, self._gate
        )

        def register(server: grpc.aio.Server) -> None:
            add_InferenceServiceServicer_to_server(servicer, server)

        self.server = build_server(
            settings, register, service_names=[SERVICE], auth=self._gate.auth, on_drain=self._on_drain
        )
        show(self.server.metrics, self.domain)
        port = await self.server.start(install_signals=install_signals)
        if settings.scheduler_address or settings.scheduler_address_file:
            self._registration = self._register(config, model)
        self.engine.on_started(lambda _: self._engine_started())
        self.engine.on_died = lambda: self._say_serving(False)
        self.engine.begin()
        self._tasks = [
            asyncio.create_task(self._follow_engine(), name="follow engine"),
            asyncio.create_task(self._prefetch(), name="prefetch"),
        ]
        return port

    async def run(self) -> int:
        """Serve until stopped; 1 if the engine could not be started."""
        await self.start(install_signals=True)
        await self.server.wait()
        await self.close()
        return 1 if self.engine.failed.done() else 0

    async def close(self) -> None:
        """End everything this server started."""
        self.server.request_drain()
        await self.server.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._registration is not None:
            await self._registration.stop()
        await self.engine.close()
        await self._events.close()
        await self._gate.close()
        await asyncio.to_thread(self._store.clean_up)

    def _client(self, config: EngineConfig) -> EngineClient:
        process = EngineProcess(
            CHILD,
            env=engine_environment(config.engine),
            log_path=self._settings.state_dir / "engine.log",
            lifeline_fd=self._settings.lifeline_fd,
        )
        return EngineClient(process, config, self._settings.engine_start_s)

    def _register(self, config: EngineConfig, model: ResolvedModel) -> Registration:
        settings = self._settings
        announcement = Announcement(
            role=job_pb2.SLOT_ROLE_INFERENCE,
            base_model=settings.base_model,
            base_digest=model.digest,
            options=job_pb2.ServerOptions(
                engine=config.engine,
                dtype=settings.dtype,
                serving_mode=config.serving_mode,
                max_lora_rank=settings.max_lora_rank,
                context_tokens=settings.context_tokens,
                accelerator=settings.accelerator,
            ),
            slots=1 if config.serving_mode == "merged" else settings.slots,
            advertise_address=self.server.address,
            pid=os.getpid(),
            server_id=settings.server_id,
        )
        if settings.instance_id:
            announcement.instance_id = settings.instance_id
        registration = Registration(
            settings,
            announcement,
            _Assignments(self.domain, self.engine, self.server),
            on_lost=self.server.request_drain,
            lost_after_s=settings.scheduler_loss_s,
            meter=self.domain.meter,
        )
        registration.start()
        return registration

    def _say_serving(self, serving: bool) -> None:
        self._tasks.append(asyncio.create_task(self.server.set_serving(serving)))

    def _engine_started(self) -> None:
        self._say_serving(True)
        if self._registration is not None:
            self._registration.set_ready()

    async def _follow_engine(self) -> None:
        """An engine that cannot be started takes the server down, after the scheduler heard why."""
        failure = await asyncio.shield(self.engine.failed)
        await self.server.set_serving(False)
        log.error("the engine cannot be started; this server ends", error=failure.message)
        if self._registration is not None:
            self._registration.set_failed(
                f"{failure.message}\n{failure.metadata.get('log_tail', '')}".strip()
            )
            await asyncio.sleep(_REPORT_FAILURE_S)
        self.server.request_drain()

    async def _prefetch(self) -> None:
        async for event in self._events.subscribe("opentinker.v1.weights.published"):
            published = event.weights_published
            with contextlib.suppress(ServiceError):
                await self.domain.prefetch(ModelRef(policy=published.policy, version=published.version))

    async def _on_drain(self) -> None:
        self.domain.start_draining()


class _Assignments:
    """What the scheduler pushes. An inference slot needs nothing prepared but a running engine."""

    def __init__(self, domain: InferenceDomain, engine: SupervisedEngine, server: KitServer) -> None:
        self._domain = domain
        self._engine = engine
        self._server = server

    async def assign(self, assignment: Assignment) -> None:
        await self._engine.wait_started()
        self._domain.leases.take(assignment.assignment, assignment.job, assignment.attempt)

    async def release(self, assignment: str, job: str) -> None:
        self._domain.leases.release(assignment)

    def request_drain(self, reason: str) -> None:
        log.info("asked to drain", reason=reason)
        self._server.request_drain()

    def load(self) -> job_pb2.ServerLoad:
        return job_pb2.ServerLoad(
            running_requests=self._domain.book.running, queued_requests=self._domain.queued()
        )


def engine_config(settings: InferenceSettings, model: ResolvedModel) -> EngineConfig:
    """How to start the engine on `model`."""
    mode: str = settings.serving_mode
    if not mode:
        mode = "merged" if settings.engine == "vllm" and vllm_runs_on_cpu() else "adapter"
    return EngineConfig(
        engine=settings.engine,
        model_dir=model.path,
        context_tokens=min(settings.context_tokens or model.context_length, model.context_length),
        dtype=settings.dtype,
        serving_mode=mode,
        max_resident_versions=settings.max_resident_versions,
        max_lora_rank=settings.max_lora_rank,
        threads=settings.threads,
        kv_cache_bytes=settings.kv_cache_bytes,
        max_rows=settings.max_rows,
    )


def _event_bus(settings: InferenceSettings) -> EventBus:
    if not settings.nats_url:
        return NullEventBus()
    return NatsEventBus(settings.nats_url, settings.nats_token())
