"""CatalogService: recorded once, under the attempt that made it."""

from typing import Any

import grpc
import pytest
from services.scheduler.tests.asking import refused

from opentinkerapi.catalog.v1 import catalog_service_pb2 as pb
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as jobs_pb

A, B = "a" * 64, "b" * 64
BIG_SEED = 2**64 - 1


def policy(name: str = "policies/p1", job: str = "", **fields: Any) -> policy_pb2.Policy:
    lora = policy_pb2.LoraTuning(rank=16, alpha=32.0, target_modules=["q_proj"])
    fields.setdefault("tuning", policy_pb2.Tuning(lora=lora))
    return policy_pb2.Policy(name=name, job=job, base_model="some-model", seed=BIG_SEED, **fields)


def register(made: policy_pb2.Policy, attempt: int = 1, **fields: Any) -> pb.RegisterPolicyRequest:
    fields.setdefault("request_id", "r1")
    fields.setdefault("version_sha256", A)
    return pb.RegisterPolicyRequest(
        policy=made, attempt=attempt, version_manifest_key="policies/p1/versions/0/manifest.json", **fields
    )


def version(number: int, sha256: str = A) -> policy_pb2.PolicyVersion:
    return policy_pb2.PolicyVersion(version=number, sha256=sha256, manifest_key="m", step=number)


def checkpoint(name: str = "c1", sha256: str = A) -> policy_pb2.Checkpoint:
    return policy_pb2.Checkpoint(
        name=f"policies/p1/checkpoints/{name}",
        sha256=sha256,
        manifest_key="k",
        step=3,
        version=2,
        size_bytes=5,
        display_name="best",
    )


@pytest.fixture
async def running(rig: Any) -> Any:
    """A rig whose `held` job runs under attempt 1."""
    job = await rig.create_job()
    rig.held = await rig.until(job.name, job_pb2.JOB_STATE_RUNNING)
    return rig


async def test_a_policy_and_its_version_0(running: Any) -> None:
    made = (await running.catalog.RegisterPolicy(register(policy(job=running.held.name)))).policy
    assert (made.name, made.job, made.project) == ("policies/p1", running.held.name, "default")
    assert made.seed == BIG_SEED
    assert made.tuning.lora.alpha == 32.0
    assert list(made.tuning.lora.target_modules) == ["q_proj"]
    got = await running.catalog.GetPolicy(pb.GetPolicyRequest(name="policies/p1"))
    assert got.policy == made
    first = await running.catalog.GetVersion(pb.GetVersionRequest(name="policies/p1/versions/0"))
    assert (first.version.sha256, first.version.version) == (A, 0)


async def test_a_restarted_trainer_registers_again(running: Any) -> None:
    """The same request under another attempt and server is the same request."""
    stub, name = running.catalog, running.held.name
    first = await stub.RegisterPolicy(register(policy(job=name), server="servers/a"))
    again = await stub.RegisterPolicy(register(policy(job=name), attempt=2, server="servers/b"))
    assert again == first
    other = register(policy(job=name), version_sha256=B)
    assert (await refused(stub.RegisterPolicy(other))).reason == Reason.REQUEST_ID_REUSED
    other = register(policy(job=name), request_id="r2")
    assert (await stub.RegisterPolicy(other)) == first
    other = register(policy(job=name), request_id="r3", version_sha256=B)
    assert (await refused(stub.RegisterPolicy(other))).reason == Reason.ALREADY_REGISTERED


async def test_versions_are_recorded_once(running: Any) -> None:
    stub = running.catalog
    await stub.RegisterPolicy(register(policy(job=running.held.name)))

    def ask(number: int, sha256: str = A, attempt: int = 1) -> pb.RegisterVersionRequest:
        return pb.RegisterVersionRequest(
            policy="policies/p1", version=version(number, sha256), attempt=attempt
        )

    first = await stub.RegisterVersion(ask(1))
    assert first.version.name == "policies/p1/versions/1"
    assert await stub.RegisterVersion(ask(1)) == first
    assert (await refused(stub.RegisterVersion(ask(1, B)))).reason == Reason.ALREADY_REGISTERED
    error = await refused(stub.RegisterVersion(ask(2, attempt=9)))
    assert error.reason == Reason.STALE_ATTEMPT
    assert error.metadata["attempt"] == "1"
    await stub.RegisterVersion(ask(3))
    await stub.RegisterVersion(ask(2))
    got = await stub.GetPolicy(pb.GetPolicyRequest(name="policies/p1"))
    assert got.policy.latest_version == 3
    page = await stub.ListVersions(pb.ListVersionsRequest(policy="policies/p1", page_size=3))
    assert [item.version for item in page.versions] == [3, 2, 1]
    rest = await stub.ListVersions(
        pb.ListVersionsRequest(policy="policies/p1", page_size=3, page_token=page.next_page_token)
    )
    assert [item.version for item in rest.versions] == [0]
    assert not rest.next_page_token


async def test_who_lost_the_job_records_nothing(running: Any) -> None:
    stub = running.catalog
    await stub.RegisterPolicy(register(policy(job=running.held.name)))
    cancel = jobs_pb.CancelJobRequest(name=running.held.name, request_id="c")
    await running.jobs.CancelJob(cancel)
    ask = pb.RegisterVersionRequest(policy="policies/p1", version=version(1), attempt=1)
    assert (await refused(stub.RegisterVersion(ask))).reason == Reason.STALE_ATTEMPT


async def test_checkpoints(running: Any) -> None:
    stub = running.catalog
    await stub.RegisterPolicy(register(policy(job=running.held.name)))

    def ask(made: policy_pb2.Checkpoint, attempt: int = 1) -> pb.RegisterCheckpointRequest:
        return pb.RegisterCheckpointRequest(policy="policies/p1", checkpoint=made, attempt=attempt)

    first = (await stub.RegisterCheckpoint(ask(checkpoint()))).checkpoint
    assert (first.size_bytes, first.version, first.display_name) == (5, 2, "best")
    assert (await stub.RegisterCheckpoint(ask(checkpoint()))).checkpoint == first
    error = await refused(stub.RegisterCheckpoint(ask(checkpoint(sha256=B))))
    assert error.reason == Reason.ALREADY_REGISTERED
    assert (await refused(stub.RegisterCheckpoint(ask(checkpoint("c2"), 5)))).reason == Reason.STALE_ATTEMPT
    await stub.RegisterCheckpoint(ask(checkpoint("c2")))
    found = await stub.ListCheckpoints(pb.ListCheckpointsRequest(policy="policies/p1"))
    assert [item.name[-2:] for item in found.checkpoints] == ["c2", "c1"]
    request = pb.DeleteCheckpointRequest(name=first.name, request_id="d")
    await stub.DeleteCheckpoint(request)
    await stub.DeleteCheckpoint(request)
    error = await refused(stub.GetCheckpoint(pb.GetCheckpointRequest(name=first.name)))
    assert error.reason == Reason.CHECKPOINT_NOT_FOUND


async def test_a_policy_outlives_its_job(running: Any) -> None:
    stub = running.catalog
    await stub.RegisterPolicy(register(policy(job=running.held.name)))
    delete = pb.DeletePolicyRequest(name="policies/p1", request_id="d")
    assert (await refused(stub.DeletePolicy(delete))).reason == Reason.INVALID_STATE
    await running.jobs.CancelJob(jobs_pb.CancelJobRequest(name=running.held.name, request_id="c"))
    of_job = pb.ListPoliciesRequest(job=running.held.name)
    assert [item.name for item in (await stub.ListPolicies(of_job)).policies] == ["policies/p1"]
    await stub.DeletePolicy(delete)
    for call, reason in (
        (stub.GetPolicy(pb.GetPolicyRequest(name="policies/p1")), Reason.POLICY_NOT_FOUND),
        (stub.GetVersion(pb.GetVersionRequest(name="policies/p1/versions/0")), Reason.VERSION_NOT_FOUND),
        (stub.ListVersions(pb.ListVersionsRequest(policy="policies/p1")), Reason.POLICY_NOT_FOUND),
    ):
        assert (await refused(call)).reason == reason


async def test_a_relaunched_trainer_is_told_its_policies(running: Any) -> None:
    import os
    import signal

    await running.catalog.RegisterPolicy(register(policy(job=running.held.name)))
    more = register(policy("policies/p2", job=running.held.name), request_id="r2")
    await running.catalog.RegisterPolicy(more)
    (server,) = await running.servers()
    os.kill(server.pid, signal.SIGKILL)
    await running.until(running.held.name, job_pb2.JOB_STATE_STARTING)
    await running.until(running.held.name, job_pb2.JOB_STATE_RUNNING)
    (server,) = await running.servers()
    (told,) = running.told(server)
    assert (told["attempt"], told["policies"]) == (2, ["policies/p1", "policies/p2"])
    # Publishing under the new attempt is progress: the crash is forgiven. The old attempt is over.
    ask = pb.RegisterVersionRequest(policy="policies/p1", version=version(1), attempt=1)
    assert (await refused(running.catalog.RegisterVersion(ask))).reason == Reason.STALE_ATTEMPT
    ask.attempt = 2
    await running.catalog.RegisterVersion(ask)
    job_id = running.held.name.removeprefix("jobs/")
    job = await running.scheduler.database.run(lambda tx: tx.jobs.find(job_id))
    assert job.crashes == ()


async def test_only_trainers_write(running: Any) -> None:
    stub = CatalogServiceStub(running.channel("bootstrap"))
    error = await refused(stub.RegisterPolicy(register(policy(job=running.held.name))))
    assert error.code is grpc.StatusCode.PERMISSION_DENIED
    assert not (await stub.ListPolicies(pb.ListPoliciesRequest())).policies


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (policy("policies/../x"), Reason.INVALID_FIELD),
        (policy("runs/x"), Reason.INVALID_FIELD),
        (policy(job="jobs/nothere"), Reason.JOB_NOT_FOUND),
        (policy(tuning=policy_pb2.Tuning()), Reason.INVALID_FIELD),
    ],
)
async def test_names_are_checked(rig: Any, made: policy_pb2.Policy, reason: Reason) -> None:
    assert (await refused(rig.catalog.RegisterPolicy(register(made)))).reason == reason


async def test_digests_are_checked(rig: Any) -> None:
    error = await refused(rig.catalog.RegisterPolicy(register(policy(), version_sha256="short")))
    assert error.reason == Reason.INVALID_FIELD
