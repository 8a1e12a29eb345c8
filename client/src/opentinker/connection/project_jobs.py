"""The jobs of a project, whoever made them: listed, followed, ended. For the command line."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Collection
from functools import partial

import grpc.aio

from opentinker import errors
from opentinker.connection.calls import PAUSE_S, ControlPlane, stream
from opentinker.connection.jobs import FINAL
from opentinker.connection.logs import read_logs
from opentinkerapi.run.v1 import run_pb2, run_service_pb2
from opentinkerapi.run.v1.run_service_pb2_grpc import RunServiceStub
from opentinkerapi.scheduler.v1 import job_pb2, log_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

_PAGE = 1000
_ROWS_A_PAGE = 1000
LOOK_EVERY_S = 2.0
"""How often a run is asked for new metrics."""


class ProjectJobs:
    """Runs on the client's loop. Jobs are named as the service names them, with or without `jobs/`."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def jobs(
        self, states: Collection["job_pb2.JobState.ValueType"] = (), limit: int | None = None
    ) -> list[job_pb2.Job]:
        """The newest jobs, all without a limit."""
        found: list[job_pb2.Job] = []
        token = ""
        while True:
            size = _PAGE if limit is None else min(_PAGE, limit - len(found))
            request = pb.ListJobsRequest(page_size=size, page_token=token, states=states)
            page = await self._control.call(partial(_list_jobs, request))
            found += page.jobs
            token = page.next_page_token
            if not token or (limit is not None and len(found) >= limit):
                return found

    async def queue(self) -> list[job_pb2.Job]:
        """Those that wait, in the order of the scheduler's last look; those not looked at come last."""
        waiting = await self.jobs([job_pb2.JOB_STATE_QUEUED])
        return sorted(waiting, key=lambda job: (job.queue_position == 0, job.queue_position))

    async def servers(self, *, ended: bool = False) -> list[job_pb2.Server]:
        """What runs, and with `ended` what ran."""
        found: list[job_pb2.Server] = []
        token = ""
        while True:
            request = pb.ListServersRequest(page_size=_PAGE, page_token=token, include_ended=ended)
            page = await self._control.call(partial(_list_servers, request))
            found += page.servers
            token = page.next_page_token
            if not token:
                return found

    def logs(
        self,
        name: str,
        *,
        follow: bool = False,
        tail_lines: int | None = None,
        server: str = "",
        all_lines: bool = False,
    ) -> AsyncIterator[log_pb2.LogLine]:
        """What became of a job and what its servers wrote about it, in order of time, across restarts of
        servers and scheduler; with `follow` also what comes, until the job has ended. `tail_lines`: begin
        with so many of the last. Who runs the cluster may ask for all lines of the job's servers, and name
        a server instead.
        """
        request = pb.ReadLogsRequest(
            name=full_name(name),
            server=f"servers/{server.removeprefix('servers/')}" if server else "",
            follow=follow,
            tail_lines=tail_lines,
            all_lines=all_lines,
        )
        return read_logs(self._control, request)

    async def cancel(self, name: str) -> job_pb2.Job:
        """End a job without an outcome."""
        request = pb.CancelJobRequest(name=full_name(name), request_id=f"cancel-{uuid.uuid4().hex}")
        answer = await self._control.call(lambda channel: SchedulerServiceStub(channel).CancelJob(request))
        return answer.job

    async def pause(self, name: str) -> job_pb2.Job:
        """Save what a job holds, and take its slots back."""
        request = pb.PauseJobRequest(name=full_name(name), request_id=f"pause-{uuid.uuid4().hex}")
        answer = await self._control.call(lambda channel: SchedulerServiceStub(channel).PauseJob(request))
        return answer.job

    async def resume(self, name: str) -> job_pb2.Job:
        """Queue a paused job again."""
        request = pb.ResumeJobRequest(name=full_name(name), request_id=f"resume-{uuid.uuid4().hex}")
        answer = await self._control.call(lambda channel: SchedulerServiceStub(channel).ResumeJob(request))
        return answer.job

    async def watch(self, name: str) -> AsyncIterator[job_pb2.Job]:
        """A job now and after each change, until it has ended, across restarts of the scheduler."""
        request, again = pb.WatchJobRequest(name=full_name(name)), pb.GetJobRequest(name=full_name(name))
        while True:
            try:
                async for response in stream(SchedulerServiceStub(self._control.channel()).WatchJob(request)):
                    yield response.job
                    if response.job.state in FINAL:
                        return
            except errors.Unavailable:
                # Asks until a scheduler answers, or nobody can expect one any more.
                await self._control.call(lambda channel: SchedulerServiceStub(channel).GetJob(again))
            await asyncio.sleep(PAUSE_S)


class RunMetrics:
    """The rows of a run as they come."""

    def __init__(self, control: ControlPlane, run: str) -> None:
        self._control = control
        self._run = run
        self._token = ""
        """Of the last page, which may get more rows."""
        self._step = -1

    async def new(self) -> list[run_pb2.MetricsRow]:
        """Rows of steps that were not there when this was last asked."""
        found: list[run_pb2.MetricsRow] = []
        token, more = self._token, True
        while more:
            request = run_service_pb2.ListMetricsRequest(
                run=self._run, page_size=_ROWS_A_PAGE, page_token=token
            )
            page = await self._control.call(partial(_list_metrics, request))
            found += [row for row in page.rows if row.step > self._step]
            more = bool(page.next_page_token)
            token = page.next_page_token or token
        # Together at the end: whoever was cut off in between reads the same rows again.
        self._token = token
        if found:
            self._step = found[-1].step
        return found


def _list_jobs(request: pb.ListJobsRequest, channel: grpc.aio.Channel) -> Awaitable[pb.ListJobsResponse]:
    return SchedulerServiceStub(channel).ListJobs(request)


def _list_servers(
    request: pb.ListServersRequest, channel: grpc.aio.Channel
) -> Awaitable[pb.ListServersResponse]:
    return SchedulerServiceStub(channel).ListServers(request)


def _list_metrics(
    request: run_service_pb2.ListMetricsRequest, channel: grpc.aio.Channel
) -> Awaitable[run_service_pb2.ListMetricsResponse]:
    return RunServiceStub(channel).ListMetrics(request)


def full_name(name: str) -> str:
    """`jobs/{job}` of a job that may be named without."""
    return name if "/" in name else f"jobs/{name}"
