"""Logs for who may see them, in order of time: what became of a job, and what its servers wrote about it.

Each server's log and the job's history is a source; a cursor says how far each was read, so that a stream
that broke goes on where it was, with this scheduler or the next one. Nothing of it is kept here.
"""

import asyncio
import contextlib
import heapq
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application.changes import job_of
from opentinker_scheduler.application.log_sources import History, LogLine, ServerLog, Source
from opentinker_scheduler.application.pages import invalid_token, make_token, read_text
from opentinker_scheduler.domain.model import Server
from opentinker_scheduler.domain.names import require
from opentinker_scheduler.domain.records import JobEvent
from opentinker_scheduler.launcher_ports import Launcher
from opentinker_scheduler.ports import Database, Transaction
from opentinkerapi.runtime.reasons import Reason

MAX_TAIL = 10_000
_CHUNK_LINES, _CHUNK_BYTES = 200, 2**17
_LOOK_AGAIN_S, _LOOK_AGAIN_MAX_S = 0.25, 2.0
_METHOD = "ReadLogs"


@dataclass(frozen=True, slots=True)
class LogRequest:
    """What somebody wants to read."""

    name: str
    """`jobs/{job}` or `servers/{server}`."""
    server: str = ""
    follow: bool = False
    tail_lines: int | None = None
    all_lines: bool = False
    cursor: str = ""

    @property
    def of_server(self) -> bool:
        return self.name.startswith("servers/")

    @property
    def scope(self) -> str:
        """What a cursor is good for."""
        return f"{self.name} {self.server} {self.all_lines}"


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Some lines, and the cursor behind them."""

    lines: Sequence[LogLine]
    cursor: str


@dataclass(frozen=True, slots=True)
class _Look:
    """How things stand."""

    servers: Sequence[Server]
    events: Sequence[JobEvent]
    over: bool
    """Nothing more is written."""


@dataclass(slots=True)
class _Reading:
    """One reader's sources."""

    job: str
    """Whose lines are read; empty: all."""
    history: History | None
    read: dict[str, int]
    """By server id, how far its log was read before."""
    servers: dict[str, ServerLog] = field(default_factory=dict)

    @property
    def sources(self) -> list[Source]:
        return [*([self.history] if self.history is not None else []), *self.servers.values()]

    def cursor(self) -> str:
        servers = {**self.read, **{key: log.position for key, log in self.servers.items()}}
        history = self.history.position if self.history is not None else 0
        return json.dumps([history, servers], separators=(",", ":"))


class Logs:
    """See the module's text."""

    def __init__(self, database: Database, launcher: Launcher) -> None:
        self._database = database
        self._launcher = launcher
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End every stream with DRAINING: the scheduler stops."""
        self._closing.set()

    async def read(self, asked: LogRequest, scope: str | None, *, admin: bool) -> AsyncIterator[LogChunk]:
        """The lines that are there and, if asked to follow, those that come."""
        _check(asked, admin=admin)
        if asked.all_lines:
            scope = None
        history, read = _read_cursor(asked)
        with_history = not asked.of_server and not asked.server
        reading = _Reading(
            job="" if asked.of_server or asked.all_lines else asked.name,
            history=History(history) if with_history else None,
            read=dict(read),
        )
        tail = None if asked.cursor else asked.tail_lines
        pause_s = _LOOK_AGAIN_S
        while True:
            look = await self._database.run(lambda tx: self._look(tx, asked, scope, reading))
            self._add(reading, look, tail)
            found = False
            if tail is not None:
                await _leave_out_all_but(tail, reading.sources)
                tail = None
                # Also where there are none: who is cut off now goes on from here.
                yield LogChunk((), make_token(_METHOD, asked.scope, reading.cursor()))
            async for chunk in _chunks(_merged(reading.sources)):
                found = True
                yield LogChunk(chunk, make_token(_METHOD, asked.scope, reading.cursor()))
            if look.over or not asked.follow:
                return
            if self._closing.is_set():
                text = "the scheduler is stopping; read again from the last cursor"
                raise ServiceError(Reason.DRAINING, text, retry_after_s=1.0)
            pause_s = _LOOK_AGAIN_S if found else min(1.5 * pause_s, _LOOK_AGAIN_MAX_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._closing.wait()

    def _look(self, tx: Transaction, asked: LogRequest, scope: str | None, reading: _Reading) -> _Look:
        if asked.of_server:
            server = _server_of(tx, asked.name, "name")
            return _Look([server], (), over=server.state.ended)
        job = job_of(tx, asked.name, scope)
        # Before the servers: whoever is not there yet will be seen, as long as the job is not over.
        over = job.state.final and not tx.assignments.of_job(job.id)
        there = map(tx.servers.find, tx.assignments.servers_of(job.id))
        found = [server for server in there if server is not None]
        if asked.server:
            found = [server for server in found if server.name == asked.server]
            if not found:
                text = f"{asked.name} had no slot on {asked.server}"
                raise ServiceError(Reason.SERVER_NOT_FOUND, text, field="server")
        history = reading.history
        events = tx.history.of_job(job.id, history.seen) if history is not None else ()
        return _Look(found, events, over)

    def _add(self, reading: _Reading, look: _Look, tail: int | None) -> None:
        """Take up servers that were not there before, and what is new of the job."""
        if reading.history is not None:
            reading.history.add(look.events)
        for server in look.servers:
            log = reading.servers.get(server.id)
            if log is None:
                at = reading.read.get(server.id, 0)
                log = ServerLog(self._launcher, server, reading.job, at, tail=tail)
                reading.servers[server.id] = log
            log.ended = server.state.ended or look.over


def _check(asked: LogRequest, *, admin: bool) -> None:
    """PERMISSION_DENIED for what is about everyone's jobs, and INVALID_FIELD."""
    if asked.tail_lines is not None and not 0 <= asked.tail_lines <= MAX_TAIL:
        text = f"tail_lines is {asked.tail_lines}; it must be from 0 to {MAX_TAIL}"
        raise ServiceError(Reason.INVALID_FIELD, text, field="tail_lines")
    if asked.of_server and not admin:
        text = "a server's log is about the jobs of everyone: only admins of the cluster read it; name a job"
        raise ServiceError(Reason.PERMISSION_DENIED, text, field="name")
    if asked.all_lines and not admin:
        text = "other lines are about the jobs of everyone: only admins of the cluster read them"
        raise ServiceError(Reason.PERMISSION_DENIED, text, field="all_lines")
    if asked.of_server and asked.server:
        raise ServiceError(Reason.INVALID_FIELD, "server goes with a job's name only", field="server")


def _server_of(tx: Transaction, name: str, field: str) -> Server:
    (server_id,) = require(name, Reason.SERVER_NOT_FOUND, field, "servers")
    server = tx.servers.find(server_id)
    if server is None:
        raise ServiceError(Reason.SERVER_NOT_FOUND, f"there is no server {name}", field=field)
    if not server.launched:
        text = f"{name} was not started by this cluster: its log is where its operator keeps it"
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field=field)
    return server


def _read_cursor(asked: LogRequest) -> tuple[int, Mapping[str, int]]:
    text = read_text(_METHOD, asked.scope, asked.cursor, field="cursor")
    if text is None:
        return 0, {}
    try:
        history, servers = json.loads(text)
        numbers = [int(history), *map(int, servers.values())]
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise invalid_token(_METHOD, "cursor") from None
    if any(not -1 <= number < 2**63 for number in numbers):
        raise invalid_token(_METHOD, "cursor")
    return numbers[0], dict(zip(servers, numbers[1:], strict=True))


async def _merged(sources: Sequence[Source]) -> AsyncGenerator[LogLine]:
    """What the sources have now, in order of time."""
    heap: list[tuple[datetime, int]] = []
    for index, source in enumerate(sources):
        if (time := await source.next_time()) is not None:
            heapq.heappush(heap, (time, index))
    while heap:
        _, index = heapq.heappop(heap)
        yield sources[index].take()
        if (time := await sources[index].next_time()) is not None:
            heapq.heappush(heap, (time, index))


async def _leave_out_all_but(number: int, sources: Sequence[Source]) -> None:
    """Take all lines but the last ones, of sources that gave none yet."""
    for source in sources:
        await source.next_time()
    more = sum(source.ready for source in sources) - number
    if more <= 0:
        return
    async with contextlib.aclosing(_merged(sources)) as lines:
        async for _ in lines:
            more -= 1
            if not more:
                return


async def _chunks(lines: AsyncIterator[LogLine]) -> AsyncIterator[list[LogLine]]:
    """Lines together, as many as go into a message of moderate size."""
    chunk: list[LogLine] = []
    size = 0
    async for line in lines:
        chunk.append(line)
        size += len(line.text)
        if len(chunk) >= _CHUNK_LINES or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
