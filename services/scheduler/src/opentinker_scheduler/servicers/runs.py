"""RunService and BlobService: the record of runs, and the way to the object store."""

from typing import Any

from opentinker_kit.auth import current_principal
from opentinker_scheduler.application.answers import Answers
from opentinker_scheduler.application.blobs import Blobs
from opentinker_scheduler.application.pages import make_token, page_size, read_int, read_text
from opentinker_scheduler.application.runs import Runs
from opentinker_scheduler.ports import Database, Transaction
from opentinker_scheduler.wire import records as wire
from opentinker_scheduler.wire.jobs import read_enum
from opentinkerapi.run.v1 import blob_service_pb2, run_pb2
from opentinkerapi.run.v1 import run_service_pb2 as pb
from opentinkerapi.run.v1.blob_service_pb2_grpc import BlobServiceServicer
from opentinkerapi.run.v1.run_service_pb2_grpc import RunServiceServicer


class RunServicer(RunServiceServicer):
    """For clients."""

    def __init__(self, database: Database, answers: Answers, runs: Runs) -> None:
        self._database = database
        self._answers = answers
        self._runs = runs

    async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.CreateRunResponse:
        run = wire.read_run(request.run, current_principal().project)

        def create(tx: Transaction) -> pb.CreateRunResponse:
            return pb.CreateRunResponse(run=wire.write_run(self._runs.create(tx, run)))

        return await self._answers.once(request, pb.CreateRunResponse, create)

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        scope = current_principal().scope
        run = await self._database.run(lambda tx: self._runs.run(tx, request.name, scope))
        return pb.GetRunResponse(run=wire.write_run(run))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        size, scope = page_size(request.page_size), current_principal().scope
        before = read_int("ListRuns", "", request.page_token)
        found = await self._database.run(lambda tx: tx.runs.page(before, size + 1, scope))
        token = make_token("ListRuns", "", found[size - 1].seq) if len(found) > size else ""
        return pb.ListRunsResponse(runs=map(wire.write_run, found[:size]), next_page_token=token)

    async def UpdateRun(self, request: pb.UpdateRunRequest, context: Any) -> pb.UpdateRunResponse:
        state = None
        if request.state != run_pb2.RUN_STATE_UNSPECIFIED:
            state = read_enum(wire.RUN_STATES, request.state, "state", "run state")
        job = request.job if request.HasField("job") else None
        scope = current_principal().scope

        def update(tx: Transaction) -> pb.UpdateRunResponse:
            run = self._runs.update(tx, request.name, job, state, scope)
            return pb.UpdateRunResponse(run=wire.write_run(run))

        return await self._answers.once(request, pb.UpdateRunResponse, update)

    async def AppendMetrics(self, request: pb.AppendMetricsRequest, context: Any) -> pb.AppendMetricsResponse:
        rows = [wire.read_metrics(row) for row in request.rows]
        scope = current_principal().scope
        await self._database.run(lambda tx: self._runs.append_metrics(tx, request.run, rows, scope))
        return pb.AppendMetricsResponse()

    async def ListMetrics(self, request: pb.ListMetricsRequest, context: Any) -> pb.ListMetricsResponse:
        size, scope = page_size(request.page_size, default=1000, maximum=10_000), current_principal().scope
        after = read_int("ListMetrics", request.run, request.page_token)
        found = await self._database.run(
            lambda tx: tx.runs.page_metrics(self._runs.run(tx, request.run, scope).id, after, size + 1)
        )
        token = make_token("ListMetrics", request.run, found[size - 1].step) if len(found) > size else ""
        return pb.ListMetricsResponse(rows=map(wire.write_metrics, found[:size]), next_page_token=token)

    async def PutLoopState(self, request: pb.PutLoopStateRequest, context: Any) -> pb.PutLoopStateResponse:
        state = wire.read_loop_state(request.loop_state)
        if state.blob is not None:
            await self._runs.check_stored(state.blob, "loop_state.state_blob", current_principal().project)

        scope = current_principal().scope

        def put(tx: Transaction) -> pb.PutLoopStateResponse:
            self._runs.put_loop_state(tx, request.run, state, scope)
            return pb.PutLoopStateResponse()

        return await self._answers.once(request, pb.PutLoopStateResponse, put)

    async def GetLoopState(self, request: pb.GetLoopStateRequest, context: Any) -> pb.GetLoopStateResponse:
        scope = current_principal().scope
        state = await self._database.run(lambda tx: self._runs.loop_state(tx, request.run, scope))
        return pb.GetLoopStateResponse(loop_state=wire.write_loop_state(state))

    async def PutGroups(self, request: pb.PutGroupsRequest, context: Any) -> pb.PutGroupsResponse:
        groups = wire.read_groups(request.groups)
        await self._runs.check_stored(groups.blob, "groups.blob", current_principal().project)

        scope = current_principal().scope

        def put(tx: Transaction) -> pb.PutGroupsResponse:
            self._runs.put_groups(tx, request.run, groups, scope)
            return pb.PutGroupsResponse()

        return await self._answers.once(request, pb.PutGroupsResponse, put)

    async def ListGroups(self, request: pb.ListGroupsRequest, context: Any) -> pb.ListGroupsResponse:
        size, scope = page_size(request.page_size), current_principal().scope
        after = read_int("ListGroups", request.run, request.page_token)
        found = await self._database.run(
            lambda tx: tx.runs.page_groups(self._runs.run(tx, request.run, scope).id, after, size + 1)
        )
        token = make_token("ListGroups", request.run, found[size - 1].step) if len(found) > size else ""
        return pb.ListGroupsResponse(groups=map(wire.write_groups, found[:size]), next_page_token=token)

    async def PutArtifact(self, request: pb.PutArtifactRequest, context: Any) -> pb.PutArtifactResponse:
        artifact = wire.read_artifact(request.artifact)
        await self._runs.check_stored(artifact.blob, "artifact.blob", current_principal().project)

        scope = current_principal().scope

        def put(tx: Transaction) -> pb.PutArtifactResponse:
            self._runs.put_artifact(tx, request.run, artifact, scope)
            return pb.PutArtifactResponse()

        return await self._answers.once(request, pb.PutArtifactResponse, put)

    async def ListArtifacts(self, request: pb.ListArtifactsRequest, context: Any) -> pb.ListArtifactsResponse:
        size, scope = page_size(request.page_size), current_principal().scope
        after = read_text("ListArtifacts", request.run, request.page_token)
        found = await self._database.run(
            lambda tx: tx.runs.page_artifacts(self._runs.run(tx, request.run, scope).id, after, size + 1)
        )
        token = make_token("ListArtifacts", request.run, found[size - 1].name) if len(found) > size else ""
        page = map(wire.write_artifact, found[:size])
        return pb.ListArtifactsResponse(artifacts=page, next_page_token=token)


class BlobServicer(BlobServiceServicer):
    """For clients, which hold no credentials of the object store."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    async def CreateUpload(
        self, request: blob_service_pb2.CreateUploadRequest, context: Any
    ) -> blob_service_pb2.CreateUploadResponse:
        upload = await self._blobs.create_upload(
            request.sha256, request.size_bytes, current_principal().project
        )
        return blob_service_pb2.CreateUploadResponse(
            blob=wire.write_blob(upload.blob),
            exists=upload.exists,
            url=upload.url,
            headers=upload.headers,
        )

    async def GetDownload(
        self, request: blob_service_pb2.GetDownloadRequest, context: Any
    ) -> blob_service_pb2.GetDownloadResponse:
        url = await self._blobs.download_url(wire.read_blob(request.blob), current_principal().project)
        return blob_service_pb2.GetDownloadResponse(url=url)
