"""Logs of jobs and servers over the whole service, with real processes."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from services.scheduler.tests.projects import Projects, create_for

from opentinker_kit.settings import read_secret
from opentinker_kit.testing import wait_until
from opentinker_scheduler.application import log_sources, logs
from opentinker_scheduler.bootstrap import access_table
from opentinkerapi.runtime.errors import OpenTinkerError, from_rpc_error
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2, log_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb
from opentinkerapi.scheduler.v1 import server_registry_service_pb2 as registry_pb

TRAINER, INFERENCE = job_pb2.SLOT_ROLE_TRAINER, job_pb2.SLOT_ROLE_INFERENCE
RUNNING = job_pb2.JOB_STATE_RUNNING
LATE = "2099-01-01T00:00:0{}Z"


def log_of(rig: Any, server: job_pb2.Server) -> Path:
    path: Path = rig.folder / "servers" / server.name.removeprefix("servers/") / "server.log"
    return path


def line(job: str = "", event: str = "x", second: int = 0, **more: Any) -> str:
    """As a server writes it, later than anything it really writes."""
    about = {"job": job} if job else {}
    return json.dumps({**about, **more, "event": event, "timestamp": LATE.format(second)}) + "\n"


def write(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.write("".join(lines))


async def read(rig: Any, name: str, metadata: Any = (), **more: Any) -> list[log_pb2.LogLine]:
    request = pb.ReadLogsRequest(name=name, **more)
    return [one async for part in rig.jobs.ReadLogs(request, metadata=metadata) for one in part.lines]


async def refusal(reading: Any) -> OpenTinkerError:
    with pytest.raises(grpc.RpcError) as caught:
        await reading
    return from_rpc_error(caught.value)


def events(lines: list[log_pb2.LogLine]) -> list[str]:
    """What the servers' lines are called."""
    return [json.loads(one.text)["event"] for one in lines if one.text.startswith("{")]


def told(lines: list[log_pb2.LogLine]) -> list[str]:
    """What the scheduler says."""
    return [one.text for one in lines if not one.server]


async def test_a_jobs_log_has_its_history_and_what_its_servers_wrote_about_it(
    rig: Any, make_slot: Any
) -> None:
    job = await rig.create_job(make_slot(TRAINER), make_slot(INFERENCE))
    await rig.until(job.name, RUNNING)
    await wait_until(lambda: _has(rig, job.name, "slot ready", 2), what="both servers say so")
    lines = await read(rig, job.name)
    said = told(lines)
    assert said[0] == "QUEUED"
    assert said[1].startswith("STARTING (attempt 1): starting")
    assert said[-1] == "RUNNING (attempt 1)"
    by_role = {one.role: one.server for one in lines if one.server}
    assert by_role == {server.role: server.name for server in await rig.servers()}
    times = [one.time.ToDatetime() for one in lines]
    assert times == sorted(times)
    assert all(json.loads(one.text)["job"] == job.name for one in lines if one.server)
    (trainer,) = [server for server in await rig.servers() if server.role == TRAINER]
    only = await read(rig, job.name, server=trainer.name)
    assert {one.server for one in only} == {trainer.name}
    # It can still be read when the job has ended.
    await rig.jobs.CancelJob(pb.CancelJobRequest(name=job.name, request_id="c"))
    await wait_until(lambda: _has(rig, job.name, "slot released", 2), what="the slots are free")
    assert told(await read(rig, job.name))[-1].startswith("CANCELLED")


async def _has(rig: Any, name: str, event: str, number: int) -> bool:
    return events(await read(rig, name)).count(event) == number


async def test_lines_about_others_are_not_shown(start_rig: Any, keys: dict[str, Path], make_job: Any) -> None:
    secrets = [read_secret(keys[f"{name}_key_file"]) for name in ("bootstrap", "service")]
    rig = await start_rig({"auth": Projects(*secrets, access_table())}, max_servers=1)
    mine, theirs = [await create_for(rig, project, make_job()) for project in ("mine", "theirs")]
    me = (("x-project", "mine"),)
    for name in (mine, theirs):
        await rig.until(name, RUNNING)
    (server,) = await rig.servers()
    forged = line(theirs, f'"job": "{mine}"', secret=f'{{"job": "{mine}"}}')
    write(
        log_of(rig, server),
        line(mine, "mine"),
        line(theirs, "theirs"),
        line("", "shared"),
        f"about {mine}, in no form\n",
        f'["{mine}"]\n',
        json.dumps({"job": {"job": mine}, "event": "nested"}) + "\n",
        forged,
        line(mine + "0", "longer"),
    )
    seen = await read(rig, mine, me)
    assert events(seen)[-1] == "mine"
    assert {json.loads(one.text)["job"] for one in seen if one.server} == {mine}
    assert (await refusal(read(rig, theirs, me))).reason == Reason.JOB_NOT_FOUND
    assert (await refusal(read(rig, "jobs/none", me))).reason == Reason.JOB_NOT_FOUND
    assert (await refusal(read(rig, server.name, me))).reason == Reason.PERMISSION_DENIED
    # Also where it does not exist: nothing is said about servers.
    assert (await refusal(read(rig, "servers/none", me))).reason == Reason.PERMISSION_DENIED
    assert (await refusal(read(rig, mine, me, all_lines=True))).reason == Reason.PERMISSION_DENIED
    # Whoever runs the cluster reads everything.
    for everything in (await read(rig, server.name), await read(rig, theirs, all_lines=True)):
        assert {"mine", "theirs", "shared", "longer"} <= set(events(everything))
        assert f"about {mine}, in no form" in [one.text for one in everything]


async def test_who_begins_in_the_middle_of_a_line_gets_nothing_of_it(
    start_rig: Any, keys: dict[str, Path], make_job: Any
) -> None:
    secrets = [read_secret(keys[f"{name}_key_file"]) for name in ("bootstrap", "service")]
    rig = await start_rig({"auth": Projects(*secrets, access_table())}, max_servers=1)
    mine, theirs = [await create_for(rig, project, make_job()) for project in ("mine", "theirs")]
    for name in (mine, theirs):
        await rig.until(name, RUNNING)
    (server,) = await rig.servers()
    path = log_of(rig, server)
    # No JSON around it: from the brace on it would be a line of one's own.
    write(path, f"their secret {line(mine, 'looks like mine')}", line(mine, "mine"))
    at = path.read_bytes().index(b'{"job": "' + mine.encode() + b'", "event": "looks')
    key = server.name.removeprefix("servers/")
    cursor = logs.make_token("ReadLogs", f"{mine}  False", json.dumps([0, {key: at}]))
    seen = await read(rig, mine, (("x-project", "mine"),), cursor=cursor)
    assert events(seen) == ["mine"]
    for wrong in ("x", logs.make_token("ReadLogs", f"{theirs}  False", "[0,{}]"), "W10"):
        error = await refusal(read(rig, mine, (("x-project", "mine"),), cursor=wrong))
        assert (error.reason, error.violations[0][0]) == (Reason.INVALID_PAGE_TOKEN, "cursor")
    for text in ('[0,{"s": -2}]', "[0]", "[0,[]]", "[1e400,{}]", f"[{2**63},{{}}]"):
        wrong = logs.make_token("ReadLogs", f"{mine}  False", text)
        error = await refusal(read(rig, mine, (("x-project", "mine"),), cursor=wrong))
        assert error.reason == Reason.INVALID_PAGE_TOKEN


async def test_a_broken_stream_goes_on_without_loss_or_repeats(
    start_rig: Any, make_slot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message read by a stream of its own that then breaks: together as one unbroken read."""
    monkeypatch.setattr(logs, "_CHUNK_LINES", 3)
    monkeypatch.setattr(log_sources, "_BLOCK", 300)
    rig = await start_rig()
    job = await rig.create_job(make_slot(TRAINER), make_slot(INFERENCE))
    await rig.until(job.name, RUNNING)
    servers = await rig.servers()
    # The two are interleaved in time, with lines of others and one longer than a block between.
    for number in range(40):
        for server in servers:
            noise = line("jobs/other", "y" * (1000 if number % 7 == 0 else 1))
            write(log_of(rig, server), noise, line(job.name, f"{number}", number // 5, of=server.name))
    whole = [one.text for one in await read(rig, job.name)]
    assert len([text for text in whole if "2099" in text]) == 80

    async def piecewise(**first: Any) -> AsyncIterator[str]:
        cursor, more = "", first
        while True:
            request = pb.ReadLogsRequest(name=job.name, cursor=cursor, **more)
            part = await anext(aiter(rig.jobs.ReadLogs(request)), None)
            if part is None:
                return
            assert len(part.lines) <= 3
            for one in part.lines:
                yield one.text
            cursor, more = part.cursor, {}

    assert [text async for text in piecewise()] == whole
    assert [text async for text in piecewise(tail_lines=31)] == whole[-31:]
    assert [text async for text in piecewise(tail_lines=10_000)] == whole


async def test_the_last_lines(rig: Any) -> None:
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    (server,) = await rig.servers()
    write(log_of(rig, server), *(line(job.name, f"{n}") + line("jobs/o", "y" * 200) for n in range(2000)))
    assert events(await read(rig, job.name, tail_lines=3)) == ["1997", "1998", "1999"]
    assert events(await read(rig, job.name, tail_lines=1500)) == [str(n) for n in range(500, 2000)]
    assert await read(rig, job.name, tail_lines=0) == []
    for wrong in (-1, 10_001):
        error = await refusal(read(rig, job.name, tail_lines=wrong))
        assert (error.reason, error.violations[0][0]) == (Reason.INVALID_FIELD, "tail_lines")


async def test_following_sees_what_is_written_later_and_ends_with_the_job(rig: Any) -> None:
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    (server,) = await rig.servers()
    seen: list[log_pb2.LogLine] = []

    async def follow() -> None:
        request = pb.ReadLogsRequest(name=job.name, follow=True, tail_lines=0)
        async for part in rig.jobs.ReadLogs(request):
            seen.extend(part.lines)

    following = asyncio.ensure_future(follow())
    await asyncio.sleep(0.3)
    write(
        log_of(rig, server), line(job.name, "later"), line("jobs/o", "not this"), line(job.name, "half")[:-9]
    )
    await wait_until(lambda: events(seen) == ["later"], what="the line is there")
    await asyncio.sleep(0.5)
    assert events(seen) == ["later"], "a line that is not whole yet waits"
    write(log_of(rig, server), line(job.name, "half")[-9:])
    await wait_until(lambda: events(seen) == ["later", "half"], what="it is whole")
    # A server that dies: its last words are shown, and so is what the next one says.
    write(log_of(rig, server), line(job.name, "last words").removesuffix("\n"))
    os.kill(server.pid, signal.SIGKILL)
    await wait_until(lambda: "slot ready" in events(seen), what="the job is on another server")
    assert events(seen)[2] == "last words"
    assert any("was killed by signal 9" in text for text in told(seen))
    assert not following.done()
    await rig.jobs.CancelJob(pb.CancelJobRequest(name=job.name, request_id="c"))
    await asyncio.wait_for(following, 20.0)
    assert events(seen)[-1] == "slot released"
    assert any(text.startswith("CANCELLED") for text in told(seen))


async def test_a_stream_goes_on_with_the_next_scheduler(start_rig: Any) -> None:
    rig = await start_rig(stop_servers_on_exit=False)
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    (server,) = await rig.servers()
    write(log_of(rig, server), line(job.name, "before"))
    stream = aiter(rig.jobs.ReadLogs(pb.ReadLogsRequest(name=job.name, follow=True)))
    part = await anext(stream)
    while "before" not in events(list(part.lines)):
        part = await anext(stream)
    stopping = asyncio.ensure_future(rig.scheduler.server.drain())
    error = await refusal(anext(stream))
    assert error.reason == Reason.DRAINING
    await stopping
    await rig.stop()
    write(log_of(rig, server), line(job.name, "between"))
    rig = await start_rig()
    seen = await read(rig, job.name, cursor=part.cursor)
    assert [event for event in events(seen) if event in ("before", "between")] == ["between"]


async def test_what_is_not_kept_is_said(start_rig: Any) -> None:
    rig = await start_rig()
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    (server,) = await rig.servers()
    os.kill(server.pid, signal.SIGKILL)
    await rig.until(job.name, job_pb2.JOB_STATE_STARTING)
    await rig.until(job.name, RUNNING)
    log_of(rig, server).unlink()
    lines = [one.text for one in await read(rig, job.name) if one.server == server.name]
    assert lines == ["its log is not kept any more"]
    (part,) = [part async for part in rig.jobs.ReadLogs(pb.ReadLogsRequest(name=job.name))]
    assert await read(rig, job.name, cursor=part.cursor) == []
    error = await refusal(read(rig, job.name, server="servers/none"))
    assert (error.reason, error.violations[0][0]) == (Reason.SERVER_NOT_FOUND, "server")
    assert (await refusal(read(rig, "servers/none"))).reason == Reason.SERVER_NOT_FOUND


async def test_a_registered_servers_log_is_with_its_operator(start_rig: Any, make_slot: Any) -> None:
    rig = await start_rig(launcher="static")
    registration = registry_pb.RegisterServerRequest(
        instance_id="i", role=TRAINER, base_model="some-model", slots=1, advertise_address="a:1", ready=True
    )
    server = (await rig.registry.RegisterServer(registration)).server
    job = await rig.create_job(make_slot(engine=""))
    await rig.until(job.name, job_pb2.JOB_STATE_STARTING)
    (said,) = [one for one in await read(rig, job.name) if one.server]
    assert (said.server, said.role) == (server, TRAINER)
    assert said.text == "it was not started by this cluster: its log is where its operator keeps it"
    error = await refusal(read(rig, server))
    assert (error.reason, error.violations[0][0]) == (Reason.UNSUPPORTED_OPTION, "name")
