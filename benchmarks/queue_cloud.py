"""Simulated servers and clients around a real scheduler; their jobs run by waiting."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from google.protobuf.duration_pb2 import Duration

from benchmarks.queue_math import Work
from opentinker_kit.files import make_key_file
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb
from opentinkerapi.scheduler.v1 import server_registry_service_pb2 as registry_pb
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from opentinkerapi.scheduler.v1.server_registry_service_pb2_grpc import ServerRegistryServiceStub

PROJECT = "x-bench-project"
HEARTBEAT_S = 5.0
MODEL = "some-model"
_CHANNELS = 8
_LINE_BYTES = 2**24


@dataclass
class Life:
    """What became of a job, on this process's clock."""

    work: Work
    project: str
    create: float
    answered: float = 0.0
    start: float = 0.0
    end: float = 0.0
    slots: int = 0
    """How many of its slots were given so far."""


@dataclass
class Cloud:
    """A scheduler process, its servers and its clients."""

    folder: Path
    servers: int
    slots: int
    reserve_after_s: float = 0.0
    lives: dict[str, Life] = field(default_factory=dict)
    waits: list[tuple[float, float]] = field(default_factory=list)
    """When a slot was given that had been freed before, and how long after."""
    assigned: list[float] = field(default_factory=list)
    """When each slot was given."""

    async def __aenter__(self) -> "Cloud":
        keys = [make_key_file(self.folder / f"{name}.key") for name in ("bootstrap", "service")]
        bootstrap, service = (path.read_text().strip() for path in keys)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.queue_scheduler",
            str(self.folder),
            f"--servers={self.servers}",
            f"--slots={self.slots}",
            f"--reserve-after-s={self.reserve_after_s}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        self._ticks: asyncio.Queue[list[tuple[float, float]]] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: list[asyncio.Task[None]] = []
        address = f"127.0.0.1:{(await self._line())['port']}"
        self._channels = [open_channel(address, key=service) for _ in range(_CHANNELS)]
        self._client = open_channel(address, key=bootstrap)
        self._jobs: Any = SchedulerServiceStub(self._client)
        self._listening = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.cancel()
        for task in (*self._tasks.values(), *self._ended):
            task.cancel()
        await asyncio.gather(self._listening, *self._tasks.values(), *self._ended, return_exceptions=True)
        for channel in (*self._channels, self._client):
            await channel.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 20)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def memory_bytes(self) -> int:
        """What the scheduler's process has in memory."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    async def ticks(self) -> list[tuple[float, float]]:
        """When each tick was since this was asked before, and how many seconds it took."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"ticks\n")
        return await self._ticks.get()

    async def submit(self, work: Work, project: str, request_id: str, limited: bool = False) -> str:
        """Create a job; with `limited` it says how long it takes."""
        slot = job_pb2.SlotSpec(role=job_pb2.SLOT_ROLE_TRAINER, base_model=MODEL, count=work.slots)
        slot.options.engine = "noop"
        job = job_pb2.Job(kind=job_pb2.JOB_KIND_LORA_RL, slots=[slot])
        if limited:
            # The limit holds for the whole time until the slots are given back, so it has some room.
            job.max_duration.CopyFrom(Duration(seconds=int(work.seconds) + 2))
        life = Life(work, project, time.perf_counter())
        request = pb.CreateJobRequest(request_id=request_id, job=job)
        response = await self._jobs.CreateJob(request, metadata=((PROJECT, project),))
        life.answered = time.perf_counter()
        name: str = response.job.name
        # Its slots may have been given before the answer came.
        early = self.lives.get(name)
        self.lives[name] = life
        if early is not None:
            life.slots = early.slots
            self._maybe_run(name, life)
        return name

    async def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the scheduler ended with status {await self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    async def _listen(self) -> None:
        while True:
            line = await self._line()
            if "start" in line:
                name = line["start"]
                self._tasks[name] = asyncio.create_task(self._serve(name, line["model"], line["slots"]))
            elif "stop" in line:
                self._tasks.pop(line["stop"]).cancel()
            elif "ticks" in line:
                self._ticks.put_nowait([(at, spent) for at, spent in line["ticks"]])

    async def _serve(self, server_id: str, model: str, slots: int) -> None:
        """One server's life."""
        stub: Any = ServerRegistryServiceStub(self._channels[hash(server_id) % _CHANNELS])
        answer = await stub.RegisterServer(
            registry_pb.RegisterServerRequest(
                instance_id=server_id,
                server_id=server_id,
                role=job_pb2.SLOT_ROLE_TRAINER,
                base_model=model,
                options=job_pb2.ServerOptions(engine="noop"),
                slots=slots,
                advertise_address="127.0.0.1:1",
                ready=True,
            )
        )
        up: asyncio.Queue[registry_pb.ServerSessionRequest] = asyncio.Queue()
        hello = registry_pb.SessionHello(server=answer.server, attempt=answer.attempt)
        up.put_nowait(registry_pb.ServerSessionRequest(hello=hello))
        freed: list[float] = []
        async for message in stub.ServerSession(_renewing(up)):
            kind, now = message.WhichOneof("message"), time.perf_counter()
            if kind == "assignment":
                if freed:
                    self.waits.append((now, now - freed.pop(0)))
                self.assigned.append(now)
                _report(up, message.assignment.assignment, registry_pb.ASSIGNMENT_STATE_READY)
                self._given(message.assignment.job)
            elif kind == "release":
                freed.append(time.perf_counter())
                _report(up, message.release.assignment, registry_pb.ASSIGNMENT_STATE_RELEASED)

    def _given(self, name: str) -> None:
        life = self.lives.setdefault(name, Life(Work(0, 0.0), "", 0.0))
        life.slots += 1
        self._maybe_run(name, life)

    def _maybe_run(self, name: str, life: Life) -> None:
        if 0 < life.work.slots == life.slots and not life.start:
            life.start = time.perf_counter()
            self._ended.append(asyncio.create_task(self._run(name, life)))

    async def _run(self, name: str, life: Life) -> None:
        await asyncio.sleep(life.work.seconds)
        request = pb.FinishJobRequest(
            name=name, request_id=f"finish-{name}", outcome=job_pb2.JOB_STATE_SUCCEEDED
        )
        await self._jobs.FinishJob(request, metadata=((PROJECT, life.project),))
        life.end = time.perf_counter()


def _report(
    up: asyncio.Queue[registry_pb.ServerSessionRequest],
    assignment: str,
    state: registry_pb.AssignmentState.ValueType,
) -> None:
    status = registry_pb.AssignmentStatus(assignment=assignment, state=state)
    up.put_nowait(registry_pb.ServerSessionRequest(status=status))


async def _renewing(
    up: asyncio.Queue[registry_pb.ServerSessionRequest],
) -> AsyncIterator[registry_pb.ServerSessionRequest]:
    """What a server says: what is queued, and that it lives."""
    renewal = registry_pb.ServerSessionRequest(renewal=registry_pb.SessionRenewal(ready=True))
    # The first thing in line is the hello, which has to come first.
    yield await up.get()
    while True:
        yield renewal
        due = time.perf_counter() + HEARTBEAT_S
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(max(0.0, due - time.perf_counter())):
                    message = await up.get()
                yield message
