"""SchedulerService: jobs and what the cluster is."""

from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from functools import partial
from typing import Any

from opentinker_kit.auth import Access, current_principal
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application.answers import Answers
from opentinker_scheduler.application.changes import job_of
from opentinker_scheduler.application.cluster import Cluster
from opentinker_scheduler.application.jobs import Jobs
from opentinker_scheduler.application.leases import Leases
from opentinker_scheduler.application.logs import Logs
from opentinker_scheduler.application.pages import make_token, page_size, read_int
from opentinker_scheduler.application.registry import Registry
from opentinker_scheduler.application.watch import JobWatchers
from opentinker_scheduler.domain.model import Job, JobState
from opentinker_scheduler.domain.prices import NO_PRICES, Prices
from opentinker_scheduler.ports import Database, Transaction
from opentinker_scheduler.wire import jobs as wire
from opentinker_scheduler.wire import logs as log_wire
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceServicer


class SchedulerServicer(SchedulerServiceServicer):
    """For clients."""

    def __init__(
        self,
        database: Database,
        answers: Answers,
        jobs: Jobs,
        watchers: JobWatchers,
        cluster: Cluster,
        registry: Registry,
        leases: Leases,
        logs: Logs,
        clock: Clock,
        wake: Callable[[], None],
        prices: Prices = NO_PRICES,
    ) -> None:
        self._database = database
        self._answers = answers
        self._jobs = jobs
        self._watchers = watchers
        self._cluster = cluster
        self._registry = registry
        self._leases = leases
        self._logs = logs
        self._clock = clock
        self._wake = wake
        self._write = partial(wire.write_job, prices=prices)

    async def CreateJob(self, request: pb.CreateJobRequest, context: Any) -> pb.CreateJobResponse:
        new = await self._jobs.admit(wire.read_new_job(request.job))
        project = current_principal().project

        def create(tx: Transaction) -> pb.CreateJobResponse:
            return pb.CreateJobResponse(job=self._write(self._jobs.create(tx, new, project)))

        response = await self._answers.once(request, pb.CreateJobResponse, create)
        job = await self._heard(response.job)
        # The token is not kept with the answer: it is made anew, for whoever may ask.
        response.job_token = self._jobs.token_of(job)
        return response

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        scope = current_principal().scope
        job = await self._database.run(lambda tx: job_of(tx, request.name, scope))
        return pb.GetJobResponse(job=self._write(job))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        states = {wire.read_enum(wire.STATES, state, "states", "job state") for state in request.states}
        asked, size = ",".join(sorted(states)), page_size(request.page_size)
        before, scope = read_int("ListJobs", asked, request.page_token), current_principal().scope
        found = await self._database.run(lambda tx: tx.jobs.page(before, size + 1, states, scope))
        token = make_token("ListJobs", asked, found[size - 1].seq) if len(found) > size else ""
        return pb.ListJobsResponse(jobs=map(self._write, found[:size]), next_page_token=token)

    async def WatchJob(self, request: pb.WatchJobRequest, context: Any) -> AsyncIterator[pb.WatchJobResponse]:
        principal = current_principal()
        async for job in self._watchers.watch(request.name, principal.scope):
            # Who only looks is not the client that a job waits for.
            if principal.may(Access.MEMBER) and self._jobs.attend(job):
                self._wake()
            yield pb.WatchJobResponse(job=self._write(job))

    async def FinishJob(self, request: pb.FinishJobRequest, context: Any) -> pb.FinishJobResponse:
        outcome = wire.read_enum(wire.STATES, request.outcome, "outcome", "job state")
        if outcome not in (JobState.SUCCEEDED, JobState.FAILED):
            text = f"outcome is {outcome.upper()}; it must be SUCCEEDED or FAILED"
            raise ServiceError(Reason.INVALID_FIELD, text, field="outcome")
        scope = current_principal().scope

        def finish(tx: Transaction) -> pb.FinishJobResponse:
            job = self._jobs.finish(tx, request.name, outcome, request.message, scope)
            return pb.FinishJobResponse(job=self._write(job))

        return await self._answers.once(request, pb.FinishJobResponse, finish)

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> pb.CancelJobResponse:
        scope = current_principal().scope

        def cancel(tx: Transaction) -> pb.CancelJobResponse:
            return pb.CancelJobResponse(job=self._write(self._jobs.cancel(tx, request.name, scope)))

        return await self._answers.once(request, pb.CancelJobResponse, cancel)

    async def PauseJob(self, request: pb.PauseJobRequest, context: Any) -> pb.PauseJobResponse:
        scope = current_principal().scope

        def pause(tx: Transaction) -> pb.PauseJobResponse:
            return pb.PauseJobResponse(job=self._write(self._jobs.pause(tx, request.name, scope)))

        return await self._answers.once(request, pb.PauseJobResponse, pause)

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Any) -> pb.ResumeJobResponse:
        scope = current_principal().scope

        def resume(tx: Transaction) -> pb.ResumeJobResponse:
            return pb.ResumeJobResponse(job=self._write(self._jobs.resume(tx, request.name, scope)))

        response = await self._answers.once(request, pb.ResumeJobResponse, resume)
        await self._heard(response.job)
        return response

    async def RenewJobLease(self, request: pb.RenewJobLeaseRequest, context: Any) -> pb.RenewJobLeaseResponse:
        scope = current_principal().scope
        lease = await self._database.run(lambda tx: self._jobs.renewable(tx, request.name, scope))
        if self._jobs.heard(lease.job):
            self._wake()
        return pb.RenewJobLeaseResponse(
            job=self._write(lease.job),
            endpoints=map(wire.write_endpoint, lease.endpoints),
            job_token=self._jobs.token_of(lease.job),
            expire_time=wire.timestamp(self._clock.now() + timedelta(seconds=lease.job.lease_ttl_s)),
        )

    async def _heard(self, answered: job_pb2.Job) -> Job:
        """A client began or resumed a job, or asked again as the first answer was lost: it has a lease.
        The job as it is now.
        """
        job = await self._database.run(lambda tx: job_of(tx, answered.name))
        if not job.state.final and job.state is not JobState.PAUSED:
            self._jobs.heard(job)
            self._wake()
        return job

    async def GetCluster(self, request: pb.GetClusterRequest, context: Any) -> pb.GetClusterResponse:
        cluster = await self._cluster.describe()
        return pb.GetClusterResponse(
            cluster=cluster.name,
            version=cluster.version,
            models=[pb.ModelInfo(model=model, loaded=loaded) for model, loaded in cluster.models.items()],
            max_servers=cluster.max_servers,
            running_servers=cluster.running_servers,
            trainer_engines=cluster.trainer_engines,
            inference_engines=cluster.inference_engines,
            env_host_address=cluster.env_host_address,
            gateway_address=cluster.gateway_address,
        )

    async def ListServers(self, request: pb.ListServersRequest, context: Any) -> pb.ListServersResponse:
        scope, size = str(request.include_ended), page_size(request.page_size)
        before = read_int("ListServers", scope, request.page_token)
        details = current_principal().is_cluster_admin

        def read(tx: Transaction) -> list[job_pb2.Server]:
            found = tx.servers.page(before, size + 1, request.include_ended)
            seqs.extend(server.seq for server in found)
            now = self._clock.now()
            servers: list[job_pb2.Server] = []
            for server in found[:size]:
                left = self._leases.server_seconds_left(server.id)
                expires = now + timedelta(seconds=left) if left > 0 else None
                used = sum(assignment.state.held for assignment in tx.assignments.of_server(server.id))
                load = self._registry.loads.get(server.id)
                servers.append(wire.write_server(server, used, load, expires, details=details))
            return servers

        seqs: list[int] = []
        servers = await self._database.run(read)
        token = make_token("ListServers", scope, seqs[size - 1]) if len(seqs) > size else ""
        return pb.ListServersResponse(servers=servers, next_page_token=token)

    async def ReadLogs(self, request: pb.ReadLogsRequest, context: Any) -> AsyncIterator[pb.ReadLogsResponse]:
        asked, principal = log_wire.read_request(request), current_principal()
        async for chunk in self._logs.read(asked, principal.scope, admin=principal.is_cluster_admin):
            yield log_wire.write_chunk(chunk)
