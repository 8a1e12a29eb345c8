"""Which operation is next in the engine, and what becomes of it.

Policies take turns, one at a time: a turn is an operation, or a slice of a Forward or ForwardBackward, so
that a small operation does not wait for the whole of a large one. After an engine's death every policy is
brought up again from its newest recovery point and its log is replayed, so that an operation's effect is
there once, whatever happened.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError, internal_error, new_error_id
from opentinker_kit.logging import about
from opentinker_kit.metering import TokenMeter
from opentinker_trainer.application.engine_host import EngineHost
from opentinker_trainer.application.executor import Executor
from opentinker_trainer.application.held import HeldPolicy
from opentinker_trainer.application.holdings import Holdings
from opentinker_trainer.application.patience import AWAY, patiently
from opentinker_trainer.application.recovery import Recovery
from opentinker_trainer.application.store import PolicyStore, Running
from opentinker_trainer.ports import Engine
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime import tracing
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.trainer.v1 import operation_pb2

log = structlog.get_logger()

_MAX_CRASHES = 2
_MARK_AFTER_S = 0.2
"""Operations that take longer are marked as running in the object store: if server and engine die together,
the next server knows what was in the engine."""
_IDLE_S = 1.0
Watcher = Callable[[str, operation_pb2.Operation], None]
"""Told the kind of each operation that has ended, with what became of it."""

_TOLD = ("publish_weights", "save_checkpoint", "restore_checkpoint")
_NOT_AN_OUTCOME = (Reason.ENGINE_CRASHED, Reason.STALE_ATTEMPT)
"""The operation runs again, here or elsewhere."""


class Dispatcher:
    """Runs what is logged."""

    def __init__(
        self,
        host: EngineHost,
        holdings: Holdings,
        executor: Executor,
        recovery: Recovery,
        store: PolicyStore,
        clock: Clock,
        *,
        recovery_every_steps: int,
        meter: TokenMeter,
    ) -> None:
        self._host = host
        self._holdings = holdings
        self._executor = executor
        self._recovery = recovery
        self._store = store
        self._clock = clock
        self._recovery_every_steps = recovery_every_steps
        self._meter = meter
        self._last = ""
        self.watcher: Watcher | None = None
        self.turn = asyncio.Lock()
        """Held for a turn; whoever takes it finds every policy between two operations, or within one whose
        effect is not there yet."""

    async def run(self) -> None:
        """For ever. ServiceError if no engine can be started."""
        while True:
            engine = await self._host.engine()
            self._adopt(engine)
            policy = self._pick()
            if policy is None:
                # Woken by new work; an engine that dies idle is found at the next look.
                await self._holdings.work.wait(_IDLE_S)
                continue
            self._last = policy.name
            async with self.turn:
                if policy.gone is None and not engine.exited.done():
                    with about(policy.job):
                        await self._work_on(engine, policy)
            policy.changed.notify()

    def _adopt(self, engine: Engine) -> None:
        """A new engine holds nothing yet."""
        for policy in self._holdings:
            if policy.holder is not engine:
                policy.holder = engine
                policy.applied_seq = None
                policy.begun = False
                policy.queue.interrupt()

    def _pick(self) -> HeldPolicy | None:
        """The next policy with something to do, after the one that had its turn."""
        ready = sorted(
            (policy.name, policy)
            for policy in self._holdings
            if policy.needs_engine() and self._holdings.may_run(policy)
        )
        for name, policy in ready:
            if name > self._last:
                return policy
        return ready[0][1] if ready else None

    async def _work_on(self, engine: Engine, policy: HeldPolicy) -> None:
        try:
            if policy.applied_seq is None:
                await self._recovery.bring_up(engine, policy)
            else:
                await self._advance(engine, policy, policy.applied_seq + 1)
        except ServiceError as error:
            if error.reason is Reason.ENGINE_CRASHED:
                await asyncio.wait([engine.exited])
                return
            if error.reason in AWAY:
                log.warning("policy waits", policy=policy.name, reason=error.reason)
                await self._clock.sleep(_IDLE_S)
                return
            # Its state cannot be had, or is another server's: this one cannot hold it.
            log.error("policy is given up", policy=policy.name, reason=error.reason, error=error.message)
            self._holdings.remove(policy, error)

    async def _advance(self, engine: Engine, policy: HeldPolicy, seq: int) -> None:
        if policy.crashes.get(seq, 0) >= _MAX_CRASHES and seq not in policy.poisoned:
            policy.poisoned.add(seq)
            await patiently(self._clock, lambda: self._store.poison(policy.name, seq))
        if seq <= policy.queue.ended_seq:
            await self._replay(engine, policy, seq)
            return
        if not policy.begun:
            policy.queue.start(seq)
        try:
            done = await self._outcome(engine, policy, seq)
        except ServiceError:
            policy.begun = False
            policy.queue.interrupt()
            raise
        policy.begun = done is None
        if done is None:
            return
        # Here and not where the engine runs it: what is run again after a crash is not used twice.
        if done.state == operation_pb2.OPERATION_STATE_DONE:
            self._meter.trained(policy.job, policy.pass_tokens)
        policy.pass_tokens = 0
        if seq > policy.queue.acked_seq:
            policy.results[seq] = done
        policy.queue.end(seq)
        policy.applied_seq = seq
        policy.traces.pop(seq, None)
        logged = policy.bodies.pop(seq, None)
        if logged is not None:
            kind = logged.WhichOneof("body") or ""
            _tell(policy, kind, done)
            if self.watcher is not None:
                self.watcher(kind, done)
        # A restored checkpoint may be deleted: nothing may have to restore it again.
        restored = done.HasField("restore_checkpoint")
        if restored or policy.state.step - policy.steps_at_recovery >= self._recovery_every_steps:
            await self._save_recovery(engine, policy)

    async def _replay(self, engine: Engine, policy: HeldPolicy, seq: int) -> None:
        if seq not in policy.poisoned:
            logged = await self._body(policy, seq)
            known = policy.results.get(seq)
            begun, policy.begun = policy.begun, False
            async with self._counting(engine, policy, seq):
                try:
                    ended = await self._executor.replay(engine, policy, logged, known, begun=begun)
                    policy.begun = not ended
                except ServiceError as error:
                    if error.reason in _NOT_AN_OUTCOME:
                        raise
                    log.info("replayed to a failure", policy=policy.name, seq=seq, reason=error.reason)
        if not policy.begun:
            policy.applied_seq = seq
            policy.pass_tokens = 0
            policy.bodies.pop(seq, None)
            policy.traces.pop(seq, None)

    async def _body(self, policy: HeldPolicy, seq: int) -> pb.LoggedOperation:
        """A logged operation, kept at hand until it has run."""
        if seq not in policy.bodies:
            logged = await patiently(self._clock, lambda: self._store.read_operation(policy.name, seq))
            policy.bodies[seq] = logged
        return policy.bodies[seq]

    async def _outcome(self, engine: Engine, policy: HeldPolicy, seq: int) -> operation_pb2.Operation | None:
        """The operation, DONE or FAILED, or None while slices of it are left. ServiceError if it must run
        again, or may not run here.
        """
        logged = await self._body(policy, seq)
        if seq in policy.poisoned:
            text = "the operation was running at two crashes of the engine and is skipped"
            if seq in policy.causes:
                text += f"; the last one: {policy.causes[seq]}"
            return _failed(policy, logged, ServiceError(Reason.POISONED, text))
        async with self._counting(engine, policy, seq):
            try:
                name = f"operation {logged.WhichOneof('body')}"
                with tracing.span(name, policy.traces.get(seq, ""), seq=seq):
                    return await self._executor.run(engine, policy, logged, begun=policy.begun)
            except ServiceError as error:
                if error.reason in _NOT_AN_OUTCOME:
                    raise
                return _failed(policy, logged, error)
            except Exception:
                error_id = new_error_id()
                log.exception("operation failed", policy=policy.name, seq=seq, error_id=error_id)
                return _failed(policy, logged, internal_error(error_id))

    @asynccontextmanager
    async def _counting(self, engine: Engine, policy: HeldPolicy, seq: int) -> AsyncIterator[None]:
        """Count a crash against the operation whose turn runs within."""
        running = Running(seq, policy.crashes.get(seq, 0))
        if running.crashes:
            await patiently(self._clock, lambda: self._store.mark_running(policy.name, running))
        ended = asyncio.Event()
        policy.begin(self._mark(policy, running, ended))
        try:
            yield
        except ServiceError as error:
            if error.reason is Reason.ENGINE_CRASHED:
                policy.crashes[seq] = running.crashes + 1
                policy.causes[seq] = error.message
                count = policy.crashes[seq]
                log.warning("the engine died", policy=policy.name, seq=seq, crashes=count, why=error.message)
            raise
        finally:
            ended.set()

    async def _mark(self, policy: HeldPolicy, running: Running, ended: asyncio.Event) -> None:
        """Mark an operation that takes long, and clear the mark when it has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MARK_AFTER_S):
                await ended.wait()
        with contextlib.suppress(ServiceError):
            if not ended.is_set():
                await self._store.mark_running(policy.name, running)
            elif not running.crashes:
                return
            await ended.wait()
            await self._store.clear_running(policy.name)

    async def _save_recovery(self, engine: Engine, policy: HeldPolicy) -> None:
        try:
            await self._recovery.save(engine, policy)
        except ServiceError as error:
            if error.reason is Reason.ENGINE_CRASHED:
                raise
            # The one before stays valid, and the log stays as long as it must.
            log.error("no recovery checkpoint", policy=policy.name, reason=error.reason, error=error.message)


def _tell(policy: HeldPolicy, kind: str, done: operation_pb2.Operation) -> None:
    """What became of an operation, where its job's owner may want to read it; not of all of a step's."""
    if done.state == operation_pb2.OPERATION_STATE_FAILED:
        log.warning("operation failed", policy=policy.name, seq=done.seq, kind=kind, error=done.error.message)
    elif kind in _TOLD:
        log.info("operation done", policy=policy.name, seq=done.seq, kind=kind, step=policy.state.step)


def _failed(policy: HeldPolicy, logged: pb.LoggedOperation, error: ServiceError) -> operation_pb2.Operation:
    return operation_pb2.Operation(
        policy=policy.name,
        seq=logged.seq,
        request_id=logged.request_id,
        state=operation_pb2.OPERATION_STATE_FAILED,
        error=error.to_status(),
    )
