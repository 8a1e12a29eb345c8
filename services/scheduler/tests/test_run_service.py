"""RunService and BlobService over a real object store."""

import asyncio
import hashlib
import math
import urllib.error
import urllib.request
from typing import Any

import pytest
from services.scheduler.tests.asking import refused

from opentinker_kit.objects import MemoryObjectStore
from opentinker_kit.settings import S3Settings
from opentinkerapi.data.v1 import blob_pb2
from opentinkerapi.run.v1 import blob_service_pb2, run_pb2
from opentinkerapi.run.v1 import run_service_pb2 as pb
from opentinkerapi.runtime.reasons import Reason

DATA = b"trajectories"
SHA = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
async def rig(start_rig: Any) -> Any:
    store = MemoryObjectStore()
    rig = await start_rig({"store": store})
    rig.store = store
    return rig


async def create(rig: Any, **fields: Any) -> run_pb2.Run:
    run = run_pb2.Run(display_name="mine", config_json='{"steps": 4}', **fields)
    response = await rig.runs.CreateRun(pb.CreateRunRequest(request_id=rig.request_id(), run=run))
    made: run_pb2.Run = response.run
    return made


def row(step: int, **values: float) -> run_pb2.MetricsRow:
    return run_pb2.MetricsRow(step=step, values=values)


async def test_a_run_and_its_changes(rig: Any) -> None:
    run = await create(rig)
    assert (run.state, run.display_name, run.config_json) == (
        run_pb2.RUN_STATE_ACTIVE,
        "mine",
        '{"steps": 4}',
    )
    job = await rig.create_job(run=run.name)
    assert job.run == run.name
    request = pb.UpdateRunRequest(name=run.name, request_id="u", job=job.name, state=run_pb2.RUN_STATE_FAILED)
    changed = (await rig.runs.UpdateRun(request)).run
    assert (changed.job, changed.state) == (job.name, run_pb2.RUN_STATE_FAILED)
    # Unset fields stay as they are; an empty job is a change.
    changed = (await rig.runs.UpdateRun(pb.UpdateRunRequest(name=run.name, request_id="v", job=""))).run
    assert (changed.job, changed.state) == ("", run_pb2.RUN_STATE_FAILED)
    assert (await rig.runs.GetRun(pb.GetRunRequest(name=run.name))).run == changed
    request = pb.UpdateRunRequest(name=run.name, request_id="w", job="jobs/none")
    assert (await refused(rig.runs.UpdateRun(request))).reason == Reason.INVALID_FIELD
    error = await refused(rig.runs.GetRun(pb.GetRunRequest(name="runs/none")))
    assert error.reason == Reason.RUN_NOT_FOUND


async def test_creating_is_idempotent_and_lists_are_paged(rig: Any) -> None:
    request = pb.CreateRunRequest(request_id="same", run=run_pb2.Run(display_name="x"))
    assert await rig.runs.CreateRun(request) == await rig.runs.CreateRun(request)
    names = [(await create(rig)).name for _ in range(3)]
    page = await rig.runs.ListRuns(pb.ListRunsRequest(page_size=3))
    assert [run.name for run in page.runs] == names[::-1]
    rest = await rig.runs.ListRuns(pb.ListRunsRequest(page_size=3, page_token=page.next_page_token))
    assert [run.display_name for run in rest.runs] == ["x"]


async def test_metrics(rig: Any) -> None:
    run = await create(rig)
    await rig.runs.AppendMetrics(pb.AppendMetricsRequest(run=run.name, rows=[row(1, a=1.5), row(2, a=2.0)]))
    await rig.runs.AppendMetrics(pb.AppendMetricsRequest(run=run.name, rows=[row(2, b=3.0), row(0, a=0.1)]))
    page = await rig.runs.ListMetrics(pb.ListMetricsRequest(run=run.name, page_size=2))
    rest = await rig.runs.ListMetrics(
        pb.ListMetricsRequest(run=run.name, page_size=2, page_token=page.next_page_token)
    )
    assert [(item.step, dict(item.values)) for item in (*page.rows, *rest.rows)] == [
        (0, {"a": 0.1}),
        (1, {"a": 1.5}),
        (2, {"b": 3.0}),
    ]
    assert all(item.HasField("time") for item in page.rows)
    assert (await rig.runs.GetRun(pb.GetRunRequest(name=run.name))).run.step == 2
    for value in (math.nan, math.inf):
        request = pb.AppendMetricsRequest(run=run.name, rows=[row(3, good=1.0), row(4, bad=value)])
        error = await refused(rig.runs.AppendMetrics(request))
        assert error.reason == Reason.INVALID_FIELD
        assert error.violations[0][0] == "rows[1].values[bad]"
    assert (await rig.runs.GetRun(pb.GetRunRequest(name=run.name))).run.step == 2


async def test_loop_state_never_goes_back(rig: Any) -> None:
    run = await create(rig)
    get = pb.GetLoopStateRequest(run=run.name)
    assert (await refused(rig.runs.GetLoopState(get))).reason == Reason.LOOP_STATE_NOT_FOUND

    def put(step: int, **fields: Any) -> pb.PutLoopStateRequest:
        state = run_pb2.LoopState(step=step, checkpoint="policies/p/checkpoints/c", **fields)
        return pb.PutLoopStateRequest(run=run.name, request_id=rig.request_id(), loop_state=state)

    request = put(5, state=b"\0five")
    await rig.runs.PutLoopState(request)
    await rig.runs.PutLoopState(request)
    got = (await rig.runs.GetLoopState(get)).loop_state
    assert (got.step, got.state, got.checkpoint) == (5, b"\0five", "policies/p/checkpoints/c")
    error = await refused(rig.runs.PutLoopState(put(4, state=b"four")))
    assert (error.reason, error.metadata["step"]) == (Reason.STALE_STEP, "5")
    await rig.runs.PutLoopState(put(5, state=b"five again"))
    missing = blob_pb2.BlobRef(sha256=SHA)
    assert (await refused(rig.runs.PutLoopState(put(6, state_blob=missing)))).reason == Reason.BLOB_NOT_FOUND
    await rig.store.put(f"blobs/{SHA}", DATA)
    await rig.runs.PutLoopState(put(6, state_blob=missing))
    got = (await rig.runs.GetLoopState(get)).loop_state
    assert (got.step, got.state, got.state_blob.sha256) == (6, b"", SHA)
    error = await refused(rig.runs.PutLoopState(put(7, state=bytes(2 * 2**20 + 1))))
    assert error.reason == Reason.INVALID_FIELD
    assert "state_blob" in error.message


async def test_groups_and_artifacts_point_to_bytes_that_are_there(rig: Any) -> None:
    run, blob = await create(rig), blob_pb2.BlobRef(sha256=SHA, size_bytes=len(DATA))

    def groups(step: int) -> pb.PutGroupsRequest:
        record = run_pb2.GroupsRecord(step=step, blob=blob, groups=8)
        return pb.PutGroupsRequest(run=run.name, request_id=rig.request_id(), groups=record)

    def artifact(name: str) -> pb.PutArtifactRequest:
        made = run_pb2.Artifact(name=name, blob=blob, media_type="image/png")
        return pb.PutArtifactRequest(run=run.name, request_id=rig.request_id(), artifact=made)

    assert (await refused(rig.runs.PutGroups(groups(1)))).reason == Reason.BLOB_NOT_FOUND
    assert (await refused(rig.runs.PutArtifact(artifact("x.png")))).reason == Reason.BLOB_NOT_FOUND
    await rig.store.put(f"blobs/{SHA}", DATA)
    for step in (2, 1, 2):
        await rig.runs.PutGroups(groups(step))
    found = await rig.runs.ListGroups(pb.ListGroupsRequest(run=run.name))
    assert [(item.step, item.groups, item.blob.sha256) for item in found.groups] == [(1, 8, SHA), (2, 8, SHA)]
    for name in ("reward.png", "a/b.json", "reward.png"):
        await rig.runs.PutArtifact(artifact(name))
    page = await rig.runs.ListArtifacts(pb.ListArtifactsRequest(run=run.name, page_size=1))
    rest = await rig.runs.ListArtifacts(
        pb.ListArtifactsRequest(run=run.name, page_size=1, page_token=page.next_page_token)
    )
    assert [item.name for item in (*page.artifacts, *rest.artifacts)] == ["a/b.json", "reward.png"]
    for name in ("../x", "/x", "a b"):
        assert (await refused(rig.runs.PutArtifact(artifact(name)))).reason == Reason.INVALID_FIELD


async def test_a_cluster_without_storage_says_so(start_rig: Any) -> None:
    rig = await start_rig()
    request = blob_service_pb2.CreateUploadRequest(sha256=SHA, size_bytes=3)
    assert (await refused(rig.blobs.CreateUpload(request))).reason == Reason.STORAGE_UNAVAILABLE


async def test_uploads_and_downloads(start_rig: Any, s3: S3Settings) -> None:
    rig = await start_rig(s3=s3)
    # Nobody else's: the store is shared.
    data = str(rig.folder).encode()
    sha = hashlib.sha256(data).hexdigest()
    ask = blob_service_pb2.CreateUploadRequest(sha256=sha, size_bytes=len(data))
    ref = blob_service_pb2.GetDownloadRequest(blob=blob_pb2.BlobRef(sha256=sha))
    assert (await refused(rig.blobs.GetDownload(ref))).reason == Reason.BLOB_NOT_FOUND
    upload = await rig.blobs.CreateUpload(ask)
    assert not upload.exists
    assert (upload.blob.sha256, upload.blob.uri) == (sha, f"blob:{sha}")
    # Other bytes do not fit, those do, and a second upload finds them there.
    assert await put(upload, b"something else") >= 400
    assert await put(upload, data) == 200
    again = await rig.blobs.CreateUpload(ask)
    assert again.exists
    assert not again.url
    url = (await rig.blobs.GetDownload(ref)).url
    assert await asyncio.to_thread(lambda: urllib.request.urlopen(url).read()) == data


@pytest.mark.parametrize(("sha256", "size"), [("abc", 1), (SHA.upper(), 1), (SHA, -1), (SHA, 2**40)])
async def test_uploads_are_checked(rig: Any, sha256: str, size: int) -> None:
    ask = blob_service_pb2.CreateUploadRequest(sha256=sha256, size_bytes=size)
    assert (await refused(rig.blobs.CreateUpload(ask))).reason == Reason.INVALID_FIELD


async def put(upload: Any, data: bytes) -> int:
    """Do the presigned PUT; the HTTP status."""
    request = urllib.request.Request(upload.url, data, dict(upload.headers), method="PUT")

    def send() -> int:
        try:
            with urllib.request.urlopen(request) as response:
                status: int = response.status
                return status
        except urllib.error.HTTPError as error:
            return error.code

    return await asyncio.to_thread(send)
