"""The life of policies on this server: made, assigned, released, unloaded."""

import asyncio
import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_kit.files import write_json
from opentinker_trainer.application.dispatcher import Dispatcher
from opentinker_trainer.application.engine_host import EngineHost
from opentinker_trainer.application.executor import Executor
from opentinker_trainer.application.held import HeldPolicy
from opentinker_trainer.application.holdings import Holdings
from opentinker_trainer.application.imports import check_names
from opentinker_trainer.application.patience import patiently
from opentinker_trainer.application.publishing import Publisher
from opentinker_trainer.application.recovery import Recovery
from opentinker_trainer.application.store import PolicyStore
from opentinker_trainer.domain.names import checkpoint_policy, policy_name
from opentinker_trainer.domain.policy_state import PolicyState
from opentinker_trainer.domain.tuning import TuningSpec, check_tuning, policy_bytes
from opentinker_trainer.ports import Catalog, Engine, ModelInfo
from opentinker_trainer.wire import tuning_message, tuning_of
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.trainer.v1 import trainer_service_pb2

log = structlog.get_logger()

_ANNOUNCE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Base:
    """The base model that this server trains on."""

    model_id: str
    digest: str
    max_lora_rank: int
    memory_limit_bytes: int
    """Of each engine process, for policies."""
    forward_bytes: int = 4
    """Size of a weight in the forward pass."""
    ranks: int = 1
    """Processes that a policy is spread over."""


class Trainer:
    """Makes and keeps policies. `base` and the engine's model must be known before a policy is made."""

    def __init__(
        self,
        base: Base,
        host: EngineHost,
        holdings: Holdings,
        dispatcher: Dispatcher,
        executor: Executor,
        recovery: Recovery,
        publisher: Publisher,
        store: PolicyStore,
        catalog: Catalog,
        clock: Clock,
        *,
        held_file: Path,
    ) -> None:
        self.base = base
        self._host = host
        self._holdings = holdings
        self._dispatcher = dispatcher
        self._executor = executor
        self._recovery = recovery
        self._publisher = publisher
        self._store = store
        self._catalog = catalog
        self._clock = clock
        self._held_file = held_file
        self._making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._assigned: dict[str, tuple[str, int]] = {}

    async def create(
        self, request: trainer_service_pb2.CreatePolicyRequest, project: str = ""
    ) -> pb.PolicyRecord:
        """Make a policy of a project and its version 0; the same request again returns the same."""
        self._holdings.check_attempt(request.job, request.attempt)
        name = policy_name(request.job, request.request_id)
        digest = _request_digest(request)
        async with self._making[name]:
            policy = await self._existing(name, request)
            if policy is None:
                policy = await self._make(name, digest, request, project)
            if policy.record.digest != digest:
                text = f"request_id {request.request_id!r} made {name} with another body"
                raise ServiceError(Reason.REQUEST_ID_REUSED, text, field="request_id")
            record = policy.record
            await patiently(
                self._clock,
                lambda: self._catalog.register_policy(
                    request.request_id, record.policy, record.version, request.attempt
                ),
            )
            if name not in self._holdings:
                self._hold(policy)
        return policy.record

    async def unload(self, name: str, attempt: int) -> None:
        """Free a policy's memory; its state stays in the object store."""
        policy = self._holdings.get(name)
        self._holdings.check_attempt(policy.job, attempt)
        await self._let_go(policy, ServiceError(Reason.POLICY_NOT_FOUND, f"{name} was unloaded"))

    async def assign(self, assignment: str, job: str, attempt: int, policies: tuple[str, ...]) -> None:
        """Give a job its slot and have its policies ready: restored, and their logs run again."""
        if self._assigned.get(job) != (assignment, attempt):
            for policy in self._holdings:
                if policy.job == job:
                    # Another server may have held it in between: the object store knows better.
                    text = "the job was assigned anew"
                    self._holdings.remove(policy, ServiceError(Reason.STALE_ATTEMPT, text))
                    await self._drop_from_engine(policy)
            self._assigned[job] = (assignment, attempt)
            self._holdings.assign(job, attempt)
        for name in policies:
            if name not in self._holdings:
                self._hold(await self._recovery.load(name, job, attempt))
        for name in policies:
            await self._caught_up(self._holdings.get(name))

    async def release(self, assignment: str, job: str) -> None:
        """Take a slot back: what the job holds is saved and freed."""
        if self._assigned.get(job, ("", 0))[0] != assignment:
            return
        self._holdings.unassign(job)
        del self._assigned[job]
        for policy in self._holdings:
            if policy.job == job:
                await self._let_go(policy, ServiceError(Reason.STALE_ATTEMPT, "the slot was released"))

    async def restore_held(self) -> None:
        """Without a scheduler: go on with what this server held before it was started again."""
        if not self._held_file.exists():
            return
        for name in json.loads(self._held_file.read_text()):
            try:
                policy = await patiently(self._clock, partial(self._recovery.load, name, "", 0))
            except ServiceError as error:
                log.error("policy cannot be restored", policy=name, reason=error.reason)
                continue
            self._hold(policy)

    async def save_all(self) -> None:
        """Take recovery checkpoints of everything, and wait until they are stored."""
        for policy in self._holdings:
            try:
                await self._checkpoint(policy)
            except ServiceError as error:
                log.error("no recovery checkpoint", policy=policy.name, reason=error.reason)

    async def announce(self) -> None:
        """For ever: tell the newest version of each policy again, for who missed it."""
        while True:
            await self._clock.sleep(_ANNOUNCE_EVERY_S)
            for policy in self._holdings:
                number = policy.state.version
                newest = max(
                    (
                        result.publish_weights.version
                        for result in policy.results.values()
                        if result.HasField("publish_weights")
                    ),
                    key=lambda version: version.version,
                    default=policy.record.version if number == 0 else None,
                )
                if newest is not None:
                    await self._publisher.announce(newest, again=f"@{self._clock.now():%H%M}")

    def describe(self, name: str) -> trainer_service_pb2.GetPolicyResponse:
        """Where a policy stands."""
        policy = self._holdings.get(name)
        shown = policy_pb2.Policy()
        shown.CopyFrom(policy.record.policy)
        shown.latest_version = policy.state.version
        return trainer_service_pb2.GetPolicyResponse(
            policy=shown,
            next_seq=policy.queue.next_seq,
            ended_seq=policy.queue.ended_seq,
            step=policy.state.step,
            version=policy.state.version,
            attempt=policy.attempt,
            open_forward_backward_seqs=policy.state.open_seqs,
        )

    async def _existing(
        self, name: str, request: trainer_service_pb2.CreatePolicyRequest
    ) -> HeldPolicy | None:
        """A policy that an earlier, perhaps interrupted, request of the same id made."""
        if name in self._holdings:
            return self._holdings.get(name)
        if await self._store.read_record(name) is None:
            return None
        return await self._recovery.load(name, request.job, request.attempt)

    async def _make(
        self, name: str, digest: str, request: trainer_service_pb2.CreatePolicyRequest, project: str
    ) -> HeldPolicy:
        engine = self._host.current()
        model = self._host.model
        assert model is not None
        spec = self._check(request, model)
        if request.from_checkpoint:
            checkpoint_policy(request.from_checkpoint)
        if request.import_files:
            if request.from_checkpoint:
                text = "a policy starts from a checkpoint or from imported weights, not from both"
                raise ServiceError(Reason.UNSUPPORTED_COMBINATION, text, field="import_files")
            check_names(request.import_files, spec)
        record = pb.PolicyRecord(
            policy=policy_pb2.Policy(
                name=name,
                job=request.job,
                base_model=self.base.model_id,
                base_digest=self.base.digest,
                tuning=tuning_message(spec),
                seed=request.seed,
                display_name=request.display_name,
                project=project,
            ),
            digest=digest,
            from_checkpoint=request.from_checkpoint,
            import_files=request.import_files,
        )
        record.policy.create_time.FromDatetime(self._clock.now())
        policy = HeldPolicy(record, spec, request.job, request.attempt)
        async with self._dispatcher.turn:
            await engine.create_policy(name, spec, request.seed)
            try:
                await self._first_version(engine, policy)
                policy.applied_seq, policy.holder = 0, engine
                if record.from_checkpoint or record.import_files:
                    # What it started from may be deleted from here on.
                    await self._recovery.save(engine, policy)
            except BaseException:
                await self._drop_from_engine(policy)
                raise
        await self._recovery.flush(policy)
        if not await self._store.write_record(record):
            # Another server was faster; what it wrote is what was promised.
            return await self._recovery.load(name, request.job, request.attempt)
        return policy

    async def _first_version(self, engine: Engine, policy: HeldPolicy) -> None:
        checkpoint = policy.record.from_checkpoint
        if checkpoint:
            step, _, _ = await self._executor.load_checkpoint(
                engine, policy, checkpoint, weights_only=False, field="from_checkpoint"
            )
            policy.state = PolicyState(step=step)
            policy.steps_at_recovery = step
        elif policy.record.import_files:
            await self._executor.import_weights(engine, policy)
        version = await self._publisher.publish_first(engine, policy)
        policy.record.version.CopyFrom(version)

    def _check(self, request: trainer_service_pb2.CreatePolicyRequest, model: ModelInfo) -> TuningSpec:
        if request.base_model != self.base.model_id:
            text = f"this server trains {self.base.model_id!r}, not {request.base_model!r}"
            raise ServiceError(Reason.UNKNOWN_MODEL, text, field="base_model")
        spec = check_tuning(tuning_of(request.tuning), model.shape, self.base.max_lora_rank)
        used = sum(self._bytes(policy.spec, model) for policy in self._holdings)
        wanted = self._bytes(spec, model)
        if used + wanted > self.base.memory_limit_bytes:
            text = (
                f"the policy needs about {wanted} bytes beside {used} in use; this server gives policies "
                f"{self.base.memory_limit_bytes}"
            )
            raise ServiceError(Reason.QUOTA_EXCEEDED, text, quota=[("policy memory", text)])
        return spec

    def _bytes(self, spec: TuningSpec, model: ModelInfo) -> int:
        return policy_bytes(spec, model.shape, forward_bytes=self.base.forward_bytes, ranks=self.base.ranks)

    def _hold(self, policy: HeldPolicy) -> None:
        self._holdings.add(policy)
        self._note_held()

    async def _caught_up(self, policy: HeldPolicy) -> None:
        while not policy.caught_up():
            if policy.gone is not None:
                raise policy.gone
            await policy.changed.wait()

    async def _let_go(self, policy: HeldPolicy, why: ServiceError) -> None:
        try:
            await self._checkpoint(policy)
        except ServiceError as error:
            # The log still has everything since the last one.
            log.error("no recovery checkpoint", policy=policy.name, reason=error.reason)
        self._holdings.remove(policy, why)
        await self._drop_from_engine(policy)
        self._note_held()

    async def _checkpoint(self, policy: HeldPolicy) -> None:
        async with self._dispatcher.turn:
            if policy.applied_seq is not None and policy.applied_seq >= policy.queue.ended_seq:
                await self._recovery.save(self._host.current(), policy)
        await self._recovery.flush(policy)

    async def _drop_from_engine(self, policy: HeldPolicy) -> None:
        try:
            await self._host.current().drop_policy(policy.name)
        except ServiceError as error:
            log.info("nothing to drop", policy=policy.name, reason=error.reason)

    def _note_held(self) -> None:
        if not self._holdings.managed:
            write_json(self._held_file, [policy.name for policy in self._holdings])


def _request_digest(request: trainer_service_pb2.CreatePolicyRequest) -> str:
    copy = trainer_service_pb2.CreatePolicyRequest()
    copy.CopyFrom(request)
    copy.ClearField("attempt")
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()
