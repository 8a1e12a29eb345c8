"""From a request to a logged operation: checked, ordered, durable, then acknowledged."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta

import structlog

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_trainer import wire
from opentinker_trainer.application.executor import samples_of
from opentinker_trainer.application.held import HeldPolicy
from opentinker_trainer.application.holdings import Holdings
from opentinker_trainer.application.recovery import Recovery
from opentinker_trainer.application.store import PolicyStore
from opentinker_trainer.domain.loss_checks import check_value_head
from opentinker_trainer.domain.losses import Component
from opentinker_trainer.domain.names import checkpoint_policy
from opentinker_trainer.domain.queue import Entry
from opentinker_trainer.domain.samples import Limits, check_samples
from opentinkerapi.data.v1 import train_sample_pb2
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime import tracing
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.trainer.v1 import operation_pb2, trainer_service_pb2

log = structlog.get_logger()

KEEP_ALIVE_S = 10.0
MAX_WAIT = timedelta(seconds=30)
_EXPIRE_EVERY_S = 0.5
_BODIES_IN_MEMORY = 64
"""Of one policy; the log has the others when their turn comes."""


class ByteBudget:
    """What bodies of operations may take in memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0

    def take(self, count: int) -> None:
        """QUOTA_EXCEEDED if there is no room."""
        if self._used + count > self._limit:
            text = f"operations in flight would take more than {self._limit} bytes; wait for results"
            raise ServiceError(
                Reason.QUOTA_EXCEEDED, text, quota=[("operation bytes", text)], retry_after_s=1.0
            )
        self._used += count

    def give_back(self, count: int) -> None:
        self._used -= count

    @contextmanager
    def taking(self) -> Iterator["Portion"]:
        """What a request took is given back at the end."""
        portion = Portion(self)
        try:
            yield portion
        finally:
            self.give_back(portion.taken)


class Portion:
    """What one request has taken of a budget so far."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.taken = 0

    def take(self, count: int) -> None:
        self._budget.take(count)
        self.taken += count


class Admission:
    """Takes operations in, and tells of them."""

    def __init__(
        self,
        holdings: Holdings,
        store: PolicyStore,
        recovery: Recovery,
        clock: Clock,
        *,
        gap_timeout_s: float,
    ) -> None:
        self._holdings = holdings
        self._store = store
        self._recovery = recovery
        self._clock = clock
        self._gap_timeout_s = gap_timeout_s
        self.limits: Limits | None = None
        """Of the loaded model; None until it is loaded."""

    async def admit(
        self, header: operation_pb2.OperationHeader, logged: pb.LoggedOperation
    ) -> operation_pb2.Operation:
        """Log an operation; returns once it and everything before it is logged.

        A repetition returns what is known of the first one. An operation that is refused here has not taken
        its seq: the same seq can be sent again with another body.
        """
        policy = self._holdings.get(header.policy)
        self._holdings.check_attempt(policy.job, header.attempt)
        logged.seq, logged.request_id = header.seq, header.request_id
        logged.digest = body_digest(logged)
        entry = Entry(header.seq, header.request_id, logged.digest)
        if header.acked_seq:
            policy.acknowledge(header.acked_seq)
        if policy.queue.entry(entry.seq) is None:
            await self._validate(policy, logged)
        if policy.queue.reserve(entry, self._clock.monotonic()):
            # A caller that goes away does not stop its operation from being logged.
            await asyncio.shield(policy.begin(self._log(policy, entry, logged)))
        await self._acknowledgeable(policy, entry)
        operation = policy.operation(entry.seq)
        if operation is None:
            raise _acknowledged(policy, entry.seq)
        return operation

    async def get(self, name: str, seq: int, wait: timedelta) -> operation_pb2.Operation:
        """One operation, at its end or where it stands after `wait`."""
        policy = self._holdings.get(name)
        deadline = self._clock.monotonic() + min(wait, MAX_WAIT).total_seconds()
        while True:
            operation = policy.operation(seq)
            if operation is None:
                raise _acknowledged(policy, seq)
            left = deadline - self._clock.monotonic()
            ended = operation.state in (
                operation_pb2.OPERATION_STATE_DONE,
                operation_pb2.OPERATION_STATE_FAILED,
            )
            if ended or left <= 0 or policy.gone is not None or self._holdings.draining:
                return operation
            await policy.changed.wait(left)

    async def watch(self, name: str, after_seq: int) -> AsyncIterator[operation_pb2.Operation | None]:
        """Ended operations after a seq, in order, for as long as the policy is held; None keeps alive."""
        policy = self._holdings.get(name)
        if after_seq < policy.queue.acked_seq:
            raise _acknowledged(policy, after_seq + 1)
        while True:
            while after_seq < policy.queue.ended_seq:
                after_seq += 1
                if (operation := policy.results.get(after_seq)) is not None:
                    yield operation
            if policy.gone is not None:
                raise policy.gone
            self._holdings.check_open()
            if not await policy.changed.wait(KEEP_ALIVE_S):
                yield None

    async def expire_gaps(self) -> None:
        """For ever: refuse what waits too long for a seq that does not come."""
        while True:
            await self._clock.sleep(_EXPIRE_EVERY_S)
            for policy in self._holdings:
                gap = policy.queue.expire_gap(self._clock.monotonic(), self._gap_timeout_s)
                if gap is not None:
                    log.warning("gap in seqs", policy=policy.name, next_seq=gap.next_seq, waiting=gap.waiting)
                    await self._forget(policy, gap.waiting)

    async def _log(self, policy: HeldPolicy, entry: Entry, logged: pb.LoggedOperation) -> None:
        try:
            await self._store.log(policy.name, logged)
        except BaseException:
            policy.queue.release(entry.seq, self._clock.monotonic())
            policy.changed.notify()
            raise
        if policy.queue.entry(entry.seq) != entry:
            await self._forget(policy, [entry.seq])
            return
        if len(policy.bodies) < _BODIES_IN_MEMORY:
            policy.bodies[entry.seq] = logged
        if trace := tracing.current():
            policy.traces[entry.seq] = trace
        policy.queue.mark_logged(entry.seq, self._clock.monotonic())
        policy.changed.notify()
        self._holdings.work.notify()
        if min(policy.durable_seq, policy.queue.acked_seq) >= policy.queue.first:
            await self._recovery.cut(policy)

    async def _acknowledgeable(self, policy: HeldPolicy, entry: Entry) -> None:
        while not policy.queue.is_acknowledgeable(entry.seq):
            if policy.gone is not None:
                raise policy.gone
            self._holdings.check_open()
            if policy.queue.entry(entry.seq) != entry:
                next_seq = policy.queue.next_seq
                if next_seq == entry.seq:
                    raise ServiceError(Reason.STORAGE_UNAVAILABLE, "it could not be logged; send it again")
                text = f"seq {entry.seq} waited for seq {next_seq}, which did not come; send that one first"
                raise ServiceError(Reason.SEQ_GAP, text, metadata={"next_seq": next_seq})
            await policy.changed.wait()

    async def _forget(self, policy: HeldPolicy, seqs: list[int] | tuple[int, ...]) -> None:
        for seq in seqs:
            policy.bodies.pop(seq, None)
        policy.changed.notify()
        with contextlib.suppress(ServiceError):  # a restart drops what lies behind a hole as well
            await self._store.forget_operations(policy.name, seqs)

    async def _validate(self, policy: HeldPolicy, logged: pb.LoggedOperation) -> None:
        project = policy.record.policy.project
        match logged.WhichOneof("body"):
            case "forward":
                _check_values(logged.forward.start, has_head=policy.record.policy.tuning.value_head)
                await self._check_samples(await samples_of(self._store, logged.forward.chunks, project), None)
            case "forward_backward":
                components = wire.components_of(logged.forward_backward.start.losses)
                check_value_head(components, has_one=policy.record.policy.tuning.value_head)
                samples = await samples_of(self._store, logged.forward_backward.chunks, project)
                await self._check_samples(samples, components)
            case "optim_step":
                step = logged.optim_step
                wire.step_of(step.adamw, step.clip_norm if step.HasField("clip_norm") else None)
                wire.denominators_of(step.denominators)
                if len(set(step.forward_backward_seqs)) != len(step.forward_backward_seqs):
                    raise ServiceError(Reason.INVALID_FIELD, "a seq repeats", field="forward_backward_seqs")
            case "save_checkpoint":
                self._check_retention(logged.save_checkpoint)
            case "restore_checkpoint":
                checkpoint_policy(logged.restore_checkpoint.checkpoint)

    def _check_retention(self, body: trainer_service_pb2.SaveCheckpointRequest) -> None:
        if body.keep_checkpoints < 0:
            text = "keep_checkpoints must be positive, or 0 for the server's setting"
            raise ServiceError(Reason.INVALID_FIELD, text, field="keep_checkpoints")
        if body.HasField("ttl") and body.ttl.ToNanoseconds() <= 0:
            raise ServiceError(Reason.INVALID_FIELD, "ttl must be positive", field="ttl")
        if not self._holdings.managed and (body.keep_checkpoints or body.HasField("ttl")):
            text = "the scheduler's catalog lets checkpoints go, and this trainer runs without one"
            field = "keep_checkpoints" if body.keep_checkpoints else "ttl"
            raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field=field)

    async def _check_samples(
        self, messages: list[train_sample_pb2.TrainSample], components: list[Component] | None
    ) -> None:
        limits = self.limits
        if limits is None:
            raise ServiceError(Reason.SERVER_STARTING, retry_after_s=1.0)
        await asyncio.to_thread(
            lambda: check_samples(wire.samples_of(messages, limits.images), limits, components)
        )


def _check_values(start: trainer_service_pb2.ForwardStart, *, has_head: bool) -> None:
    if start.return_values and (start.use_base_model or not has_head):
        owner = "the base model" if start.use_base_model else "this policy"
        text = f"{owner} has no value head (tuning.value_head) that could say values"
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="return_values")


def body_digest(logged: pb.LoggedOperation) -> str:
    """SHA-256 of a body without what may differ in a repetition: attempt, acknowledgement, token."""
    copy = pb.LoggedOperation()
    copy.CopyFrom(logged)
    copy.digest = ""
    body = getattr(copy, copy.WhichOneof("body") or "")
    header = body.start.header if hasattr(body, "start") else body.header
    header.ClearField("attempt")
    header.ClearField("acked_seq")
    if not hasattr(body, "start"):
        body.ClearField("job_token")
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()


def _acknowledged(policy: HeldPolicy, seq: int) -> ServiceError:
    text = (
        f"{policy.name} has no operation {seq}, or its result was acknowledged; results are kept after "
        f"{policy.queue.acked_seq}, next_seq is {policy.queue.next_seq}"
    )
    metadata = {"acked_seq": policy.queue.acked_seq, "next_seq": policy.queue.next_seq}
    return ServiceError(Reason.OPERATION_NOT_FOUND, text, metadata=metadata)
