"""A policy that this server holds: its order, its results, and where its engine state stands."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.policy_state import PolicyState
from opentinker_trainer.domain.queue import PolicyQueue
from opentinker_trainer.domain.tuning import TuningSpec
from opentinkerapi.engine.v1 import trainer_engine_pb2
from opentinkerapi.trainer.v1 import operation_pb2

log = structlog.get_logger()


class Signal:
    """Wakes everyone who waits, each time it is set off."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Return at the next `notify`, or False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class RecoveryPoint:
    """Saved engine state to go on from."""

    seq: int
    """Everything up to here is in it."""
    state: PolicyState
    directory: Path
    """Its files on this host; fetched from the object store where they are not there."""


@dataclass(slots=True)
class HeldPolicy:
    """Mutable record of one policy. Changed by the event loop's thread only."""

    record: trainer_engine_pb2.PolicyRecord
    spec: TuningSpec
    job: str
    attempt: int
    queue: PolicyQueue = field(default_factory=PolicyQueue)
    results: dict[int, operation_pb2.Operation] = field(default_factory=dict)
    """Ended operations whose results are not acknowledged."""
    bodies: dict[int, trainer_engine_pb2.LoggedOperation] = field(default_factory=dict)
    """Logged operations that did not run yet; the log has them all."""
    state: PolicyState = field(default_factory=PolicyState)
    """As of `applied_seq`."""
    applied_seq: int | None = None
    """The engine's state includes everything up to here; None: the engine does not have the policy."""
    begun: bool = False
    """The engine has an open pass of the operation after `applied_seq`: some of its slices have run."""
    pass_tokens: int = 0
    """Tokens of the samples of the Forward or ForwardBackward that was begun last, until it ends."""
    recovery: RecoveryPoint | None = None
    """Newest state saved on this host."""
    durable_seq: int = 0
    """Seq of the newest recovery checkpoint in the object store."""
    steps_at_recovery: int = 0
    crashes: dict[int, int] = field(default_factory=dict)
    """How often an operation was running when its engine or server died."""
    causes: dict[int, str] = field(default_factory=dict)
    """What is known of the last such death, by seq."""
    traces: dict[int, str] = field(default_factory=dict)
    """The trace that an operation belongs to, by its seq; empty where no traces are made."""
    poisoned: set[int] = field(default_factory=set)
    uploads: dict[int, "asyncio.Task[None]"] = field(default_factory=dict)
    """Version uploads under way, by the seq of their operation: the log is not cut beyond them."""
    background: set["asyncio.Task[None]"] = field(default_factory=set)
    changed: Signal = field(default_factory=Signal)
    holder: object = None
    """The engine that has its state; with another one it must be brought up again."""
    gone: ServiceError | None = None
    """Why this server does not hold it any more."""

    @property
    def name(self) -> str:
        return self.record.policy.name

    @property
    def id(self) -> str:
        return self.name.rpartition("/")[2]

    def needs_engine(self) -> bool:
        """Whether the engine has something to do for it."""
        return self.applied_seq is None or self.applied_seq < self.queue.contiguous

    def caught_up(self) -> bool:
        """Whether the engine has its state and every logged operation has ended."""
        return self.applied_seq is not None and self.applied_seq >= self.queue.contiguous

    def operation(self, seq: int) -> operation_pb2.Operation | None:
        """Where an operation stands; None if it is not known or its result was acknowledged."""
        if seq in self.results:
            return self.results[seq]
        entry = self.queue.entry(seq)
        if entry is None or seq <= self.queue.ended_seq:
            return None
        running = seq == self.queue.running
        state = operation_pb2.OPERATION_STATE_RUNNING if running else operation_pb2.OPERATION_STATE_QUEUED
        return operation_pb2.Operation(policy=self.name, seq=seq, request_id=entry.request_id, state=state)

    def begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run work beside everything else, for as long as the policy is held."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self.background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("background work failed", policy=self.name, error=str(error))

    def acknowledge(self, acked_seq: int) -> None:
        """The client has results up to `acked_seq`."""
        for seq in self.queue.acknowledge(acked_seq):
            self.results.pop(seq, None)

    def close(self, why: ServiceError) -> None:
        """The server does not hold it any more; whoever waits is told."""
        self.gone = why
        for task in (*self.background, *self.uploads.values()):
            task.cancel()
        self.changed.notify()
