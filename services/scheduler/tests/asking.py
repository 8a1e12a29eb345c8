"""What tests of the scheduler's calls ask for again and again."""

from typing import Any

import grpc
import pytest

from opentinker_kit.testing import wait_until
from opentinkerapi.runtime.errors import OpenTinkerError, from_rpc_error
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb


async def refused(call: Any) -> OpenTinkerError:
    """What a call is refused with."""
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def cancel(rig: Any, job: job_pb2.Job) -> None:
    await rig.jobs.CancelJob(pb.CancelJobRequest(name=job.name, request_id=f"cancel-{job.name}"))


async def says(rig: Any, job: job_pb2.Job, *words: str) -> None:
    """The job says what it waits for."""

    async def told() -> bool:
        reason = (await rig.job(job.name)).state_reason
        return all(word in reason for word in words)

    await wait_until(told, what=f"{job.name} says {words}")
