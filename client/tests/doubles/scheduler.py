"""A scheduler without a cluster: jobs run as soon as they are made, runs are kept in memory."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from client.tests.doubles.trainer import abort

from opentinkerapi.run.v1 import run_pb2, run_service_pb2
from opentinkerapi.run.v1.run_service_pb2_grpc import RunServiceServicer
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2, scheduler_service_pb2
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceServicer


class SchedulerDouble(SchedulerServiceServicer, RunServiceServicer):
    """`address` is where every slot is served, but for inference where `replicas` says where."""

    def __init__(self) -> None:
        self.address = ""
        self.attempt = 1
        self.replicas: dict[str, int] = {}
        """Attempts of the inference servers, by address."""
        self.jobs: dict[str, job_pb2.Job] = {}
        self.renewals = 0
        self.starting = 0
        """How many renewals find the job still STARTING."""
        self.metrics: dict[str, dict[int, dict[str, float]]] = {}
        self.runs: dict[str, run_pb2.Run] = {}
        self.loop_states: list[run_pb2.LoopState] = []
        self.refuse_model = ""
        self.gateway = ""
        self.job_token = "token"

    async def CreateJob(self, request: scheduler_service_pb2.CreateJobRequest, context: Any) -> Any:
        if request.job.slots[0].base_model == self.refuse_model:
            await abort(context, Reason.UNKNOWN_MODEL, "no such model; known: smollm2-135m-instruct")
        job = job_pb2.Job()
        job.CopyFrom(request.job)
        job.name = f"jobs/j{len(self.jobs)}"
        job.state = job_pb2.JOB_STATE_RUNNING
        self.jobs[job.name] = job
        return scheduler_service_pb2.CreateJobResponse(job=job)

    async def RenewJobLease(self, request: scheduler_service_pb2.RenewJobLeaseRequest, context: Any) -> Any:
        self.renewals += 1
        job = self.jobs[request.name]
        if job.state in (job_pb2.JOB_STATE_FAILED, job_pb2.JOB_STATE_CANCELLED, job_pb2.JOB_STATE_SUCCEEDED):
            await abort(context, Reason.INVALID_STATE, "the job has ended")
        if self.starting > 0:
            self.starting -= 1
            waiting = job_pb2.Job()
            waiting.CopyFrom(job)
            waiting.state = job_pb2.JOB_STATE_STARTING
            waiting.state_reason = "loading the model"
            return scheduler_service_pb2.RenewJobLeaseResponse(job=waiting)
        response = scheduler_service_pb2.RenewJobLeaseResponse(job=job, job_token=self.job_token)
        for index, slot in enumerate(job.slots):
            if slot.role == job_pb2.SLOT_ROLE_INFERENCE and self.replicas:
                for address, attempt in self.replicas.items():
                    response.endpoints.add(role=slot.role, address=address, attempt=attempt, slot_index=index)
                continue
            response.endpoints.add(
                role=slot.role, address=self.address, attempt=self.attempt, slot_index=index
            )
        return response

    async def GetJob(self, request: scheduler_service_pb2.GetJobRequest, context: Any) -> Any:
        return scheduler_service_pb2.GetJobResponse(job=self.jobs[request.name])

    async def WatchJob(
        self, request: scheduler_service_pb2.WatchJobRequest, context: Any
    ) -> AsyncIterator[scheduler_service_pb2.WatchJobResponse]:
        while True:
            yield scheduler_service_pb2.WatchJobResponse(job=self.jobs[request.name])
            await asyncio.sleep(0.05)

    async def FinishJob(self, request: scheduler_service_pb2.FinishJobRequest, context: Any) -> Any:
        job = self.jobs[request.name]
        job.state = request.outcome
        return scheduler_service_pb2.FinishJobResponse(job=job)

    async def CancelJob(self, request: scheduler_service_pb2.CancelJobRequest, context: Any) -> Any:
        job = self.jobs[request.name]
        job.state = job_pb2.JOB_STATE_CANCELLED
        return scheduler_service_pb2.CancelJobResponse(job=job)

    async def GetCluster(self, request: scheduler_service_pb2.GetClusterRequest, context: Any) -> Any:
        return scheduler_service_pb2.GetClusterResponse(cluster="double", gateway_address=self.gateway)

    async def ListServers(self, request: scheduler_service_pb2.ListServersRequest, context: Any) -> Any:
        return scheduler_service_pb2.ListServersResponse()

    async def ListJobs(self, request: scheduler_service_pb2.ListJobsRequest, context: Any) -> Any:
        return scheduler_service_pb2.ListJobsResponse(jobs=self.jobs.values())

    async def CreateRun(self, request: run_service_pb2.CreateRunRequest, context: Any) -> Any:
        run = run_pb2.Run()
        run.CopyFrom(request.run)
        run.name = f"runs/r{len(self.runs)}"
        self.runs[run.name] = run
        return run_service_pb2.CreateRunResponse(run=run)

    async def UpdateRun(self, request: run_service_pb2.UpdateRunRequest, context: Any) -> Any:
        run = self.runs[request.name]
        if request.HasField("job"):
            run.job = request.job
        if request.state:
            run.state = request.state
        return run_service_pb2.UpdateRunResponse(run=run)

    async def AppendMetrics(self, request: run_service_pb2.AppendMetricsRequest, context: Any) -> Any:
        rows = self.metrics.setdefault(request.run, {})
        for row in request.rows:
            rows[row.step] = dict(row.values)
        return run_service_pb2.AppendMetricsResponse()

    async def GetLoopState(self, request: run_service_pb2.GetLoopStateRequest, context: Any) -> Any:
        if not self.loop_states:
            await abort(context, Reason.LOOP_STATE_NOT_FOUND, f"{request.run} has no loop state yet")
        return run_service_pb2.GetLoopStateResponse(loop_state=self.loop_states[-1])

    async def PutLoopState(self, request: run_service_pb2.PutLoopStateRequest, context: Any) -> Any:
        self.loop_states.append(request.loop_state)
        return run_service_pb2.PutLoopStateResponse()
