"""Logs of jobs and servers, across restarts of the scheduler."""

import asyncio
from collections.abc import AsyncIterator, Awaitable

import grpc.aio

from opentinker import errors
from opentinker.connection.calls import PAUSE_S, ControlPlane, stream
from opentinkerapi.scheduler.v1 import log_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub


async def read_logs(control: ControlPlane, request: pb.ReadLogsRequest) -> AsyncIterator[log_pb2.LogLine]:
    """The lines that a request asks for. A stream that breaks goes on where it was."""
    again = pb.ReadLogsRequest()
    again.CopyFrom(request)
    while True:
        try:
            async for response in stream(SchedulerServiceStub(control.channel()).ReadLogs(again)):
                for line in response.lines:
                    yield line
                again.cursor = response.cursor
            return
        except errors.Unavailable:
            # Asks until a scheduler answers, or nobody can expect one any more.
            await control.call(_answers)
        await asyncio.sleep(PAUSE_S)


def _answers(channel: grpc.aio.Channel) -> Awaitable[pb.GetClusterResponse]:
    return SchedulerServiceStub(channel).GetCluster(pb.GetClusterRequest())
