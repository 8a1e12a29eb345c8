"""Jobs on no-op engines in an embedded stack, over plain gRPC: what crash tests need something running
for.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc

from opentinker_local import StackInfo
from opentinkerapi.runtime.channels import auth_metadata
from opentinkerapi.scheduler.v1 import job_pb2, scheduler_service_pb2
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

NOOP = job_pb2.ServerOptions(engine="noop")
DEADLINE_S = 20.0


def noop_job(model: Path) -> job_pb2.Job:
    """A LoRA job on servers that load nothing."""
    return job_pb2.Job(
        kind=job_pb2.JOB_KIND_LORA_RL,
        slots=[
            job_pb2.SlotSpec(
                role=job_pb2.SLOT_ROLE_TRAINER,
                base_model=str(model),
                tuning=job_pb2.TUNING_KIND_LORA,
                options=NOOP,
            ),
            job_pb2.SlotSpec(role=job_pb2.SLOT_ROLE_INFERENCE, base_model=str(model), options=NOOP),
        ],
    )


class Jobs:
    """A client of a stack's scheduler, blocking."""

    def __init__(self, stack: StackInfo) -> None:
        self._channel = grpc.insecure_channel(stack.scheduler)
        self._stub: SchedulerServiceStub = SchedulerServiceStub(self._channel)
        self._metadata = auth_metadata(stack.bootstrap_key_file.read_text().strip())

    def create(self, job: job_pb2.Job) -> str:
        request = scheduler_service_pb2.CreateJobRequest(request_id=uuid4().hex, job=job)
        return str(self._call(self._stub.CreateJob, request).job.name)

    def get(self, name: str) -> job_pb2.Job:
        job: job_pb2.Job = self._call(self._stub.GetJob, scheduler_service_pb2.GetJobRequest(name=name)).job
        return job

    def renew(self, name: str) -> None:
        """Say that the job's client is still there: a scheduler that restarted wants to hear it."""
        self._call(self._stub.RenewJobLease, scheduler_service_pb2.RenewJobLeaseRequest(name=name))

    def servers(self) -> list[job_pb2.Server]:
        """Servers that are not over."""
        over = (job_pb2.SERVER_STATE_STOPPED, job_pb2.SERVER_STATE_LOST)
        answer = self._call(self._stub.ListServers, scheduler_service_pb2.ListServersRequest())
        return [server for server in answer.servers if server.state not in over]

    def await_state(
        self, names: Sequence[str], state: "job_pb2.JobState.ValueType", timeout_s: float
    ) -> None:
        """Renew these jobs until all are in a state; AssertionError with what they say otherwise."""
        deadline = time.monotonic() + timeout_s
        while not all((job := self.get(name)).state == state for name in names):
            assert time.monotonic() < deadline, f"{job.name}: {job.state_reason} {job.error.message}"
            self.renew(job.name)
            time.sleep(0.1)

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        # A scheduler that was just killed is back in a moment.
        return method(request, metadata=self._metadata, timeout=DEADLINE_S, wait_for_ready=True)
