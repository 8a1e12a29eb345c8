"""Calls for projects that need no accounts: a header names the project."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from opentinker_kit.auth import AuthPolicy, Kind, Principal
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb


class Projects(AuthPolicy):
    """The usual keys. Whose call it is, a header says; without it, that of one who sees everything."""

    async def identify(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Principal:
        pairs = list(metadata)
        principal = await super().identify(method, pairs)
        project = dict(pairs).get("x-project")
        return Principal(Kind.SERVICE) if project is None else replace(principal, project=str(project))


async def create_for(rig: Any, project: str, job: job_pb2.Job) -> str:
    request = pb.CreateJobRequest(request_id=rig.request_id(), job=job)
    response = await rig.jobs.CreateJob(request, metadata=(("x-project", project),))
    return str(response.job.name)
