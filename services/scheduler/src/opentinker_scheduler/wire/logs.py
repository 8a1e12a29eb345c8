"""Logs as messages."""

from opentinker_scheduler.application.log_sources import LogLine
from opentinker_scheduler.application.logs import LogChunk, LogRequest
from opentinker_scheduler.wire.jobs import ROLE_OUT
from opentinkerapi.scheduler.v1 import log_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb


def read_request(request: pb.ReadLogsRequest) -> LogRequest:
    return LogRequest(
        name=request.name,
        server=request.server,
        follow=request.follow,
        tail_lines=request.tail_lines if request.HasField("tail_lines") else None,
        all_lines=request.all_lines,
        cursor=request.cursor,
    )


def write_chunk(chunk: LogChunk) -> pb.ReadLogsResponse:
    return pb.ReadLogsResponse(lines=map(_write_line, chunk.lines), cursor=chunk.cursor)


def _write_line(line: LogLine) -> log_pb2.LogLine:
    result = log_pb2.LogLine(server=line.server, text=line.text)
    if line.role is not None:
        result.role = ROLE_OUT[line.role]
    if line.time is not None:
        result.time.FromDatetime(line.time)
    return result
