"""Deployments: named, kept alive without a client, promoted and rolled back, and what names stand for."""

from typing import Any

import pytest
from services.scheduler.tests.asking import refused

from opentinker_kit.testing import wait_until
from opentinkerapi.catalog.v1 import catalog_service_pb2 as pb
from opentinkerapi.catalog.v1 import deployment_pb2, policy_pb2
from opentinkerapi.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as jobs_pb

A, B, C = "a" * 64, "b" * 64, "c" * 64
RUNNING, INFERENCE = job_pb2.JOB_STATE_RUNNING, job_pb2.SLOT_ROLE_INFERENCE
SERVING = deployment_pb2.DEPLOYMENT_STATE_SERVING
FAILED = deployment_pb2.DEPLOYMENT_STATE_FAILED
NOOP = job_pb2.ServerOptions(engine="noop")
P = "policies/p1"


class Deploying:
    """What a user does with deployments, by the user's key."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.stub = CatalogServiceStub(rig.channel())

    async def create(
        self, deployment_id: str = "guesser", model: str = P, request_id: str = "", **fields: Any
    ) -> deployment_pb2.Deployment:
        fields.setdefault("options", NOOP)
        request = pb.CreateDeploymentRequest(
            request_id=request_id or self.rig.request_id(),
            deployment_id=deployment_id,
            deployment=deployment_pb2.Deployment(model=model, **fields),
        )
        return (await self.stub.CreateDeployment(request)).deployment

    async def get(self, name: str = "deployments/guesser") -> deployment_pb2.Deployment:
        return (await self.stub.GetDeployment(pb.GetDeploymentRequest(name=name))).deployment

    async def until(self, state: int, name: str = "deployments/guesser") -> deployment_pb2.Deployment:
        async def there() -> bool:
            return (await self.get(name)).state == state

        await wait_until(there, 30.0, what=f"{name} in state {state}")
        return await self.get(name)

    async def promote(
        self, model: str, name: str = "deployments/guesser", request_id: str = ""
    ) -> deployment_pb2.Deployment:
        request = pb.PromoteDeploymentRequest(
            name=name, model=model, request_id=request_id or self.rig.request_id()
        )
        return (await self.stub.PromoteDeployment(request)).deployment

    async def roll_back(self, request_id: str = "") -> deployment_pb2.Deployment:
        request = pb.RollBackDeploymentRequest(
            name="deployments/guesser", request_id=request_id or self.rig.request_id()
        )
        return (await self.stub.RollBackDeployment(request)).deployment

    async def delete(self, name: str = "deployments/guesser") -> None:
        await self.stub.DeleteDeployment(
            pb.DeleteDeploymentRequest(name=name, request_id=self.rig.request_id())
        )

    async def resolve(self, name: str) -> pb.ResolveModelResponse:
        answer: pb.ResolveModelResponse = await self.stub.ResolveModel(pb.ResolveModelRequest(name=name))
        return answer


async def trained(rig: Any, job: str = "", attempt: int = 1, rank: int = 16, name: str = P) -> None:
    """A policy with versions 1 and 2 and a checkpoint."""
    tuning = policy_pb2.Tuning(lora=policy_pb2.LoraTuning(rank=rank))
    policy = policy_pb2.Policy(name=name, job=job, base_model="some-model", tuning=tuning)
    await rig.catalog.RegisterPolicy(
        pb.RegisterPolicyRequest(
            request_id=f"register-{name}", policy=policy, version_sha256=A, attempt=attempt
        )
    )
    for number in (1, 2):
        version = policy_pb2.PolicyVersion(version=number, sha256=B, manifest_key="m")
        await rig.catalog.RegisterVersion(
            pb.RegisterVersionRequest(policy=name, version=version, attempt=attempt)
        )
    checkpoint = policy_pb2.Checkpoint(name=f"{name}/checkpoints/c1", sha256=C, manifest_key="k", version=2)
    await rig.catalog.RegisterCheckpoint(
        pb.RegisterCheckpointRequest(policy=name, checkpoint=checkpoint, attempt=attempt)
    )


@pytest.fixture
async def deploying(rig: Any) -> Deploying:
    """A policy that no job holds any more."""
    await trained(rig)
    return Deploying(rig)


async def test_a_policy_is_served_after_its_job_by_the_servers_it_was_sampled_from(
    rig: Any, make_slot: Any
) -> None:
    """Nobody renews anything, and the server that is loaded already is used."""
    job = await rig.create_job(make_slot(), make_slot(INFERENCE, max_lora_rank=48, context_tokens=512))
    await rig.until(job.name, RUNNING)
    await trained(rig, job.name)
    done = jobs_pb.FinishJobRequest(name=job.name, request_id="f", outcome=job_pb2.JOB_STATE_SUCCEEDED)
    await rig.jobs.FinishJob(done)
    before = {server.name for server in await rig.servers()}
    deploying = Deploying(rig)
    made = await deploying.create(options=job_pb2.ServerOptions())
    assert (made.name, made.model) == ("deployments/guesser", f"{P}/versions/2")
    assert (made.options.max_lora_rank, made.options.context_tokens) == (48, 512)
    serving = await deploying.until(SERVING)
    assert {server.name for server in await rig.servers()} == before
    own = await rig.job(serving.job)
    assert own.kind == job_pb2.JOB_KIND_INFERENCE
    assert own.on_client_loss == job_pb2.ON_CLIENT_LOSS_DETACH
    found = await deploying.resolve("guesser")
    assert [endpoint.server in before for endpoint in found.endpoints] == [True]
    assert (found.job, found.deployment) == (serving.job, "deployments/guesser")
    assert found.model_ref.policy_version.version == 2
    assert found.endpoints[0].attempt == own.attempt
    assert found.job_token


async def test_promoting_and_rolling_back_keep_the_servers(deploying: Deploying) -> None:
    made = await deploying.create(model=f"{P}/versions/1")
    assert not made.previous_models
    promoted = await deploying.promote(P)
    assert promoted.model == f"{P}/versions/2"
    assert promoted.job == made.job
    assert promoted.update_time.ToNanoseconds() > made.update_time.ToNanoseconds()
    promoted = await deploying.promote(f"{P}/checkpoints/c1")
    assert list(promoted.previous_models) == [f"{P}/versions/2", f"{P}/versions/1"]
    assert (await deploying.resolve("guesser")).model_ref.checkpoint == f"{P}/checkpoints/c1"
    same = await deploying.promote(f"{P}/checkpoints/c1")
    assert same == promoted, "the same again changes nothing"
    assert (await deploying.promote("models/some-model")).model == "models/some-model"
    assert (await deploying.roll_back()).model == f"{P}/checkpoints/c1"
    back = await deploying.roll_back()
    assert (back.model, list(back.previous_models)) == (f"{P}/versions/2", [f"{P}/versions/1"])
    last = await deploying.roll_back(request_id="last")
    assert (last.model, last.job) == (f"{P}/versions/1", made.job)
    assert await deploying.roll_back(request_id="last") == last
    error = await refused(deploying.roll_back())
    assert error.reason == Reason.INVALID_STATE
    assert "nothing to go back to" in error.message


async def test_a_request_sent_again_deploys_once(deploying: Deploying) -> None:
    first = await deploying.create(request_id="r")
    assert await deploying.create(request_id="r") == first
    error = await refused(deploying.create("other", request_id="r"))
    assert error.reason == Reason.REQUEST_ID_REUSED
    error = await refused(deploying.create())
    assert error.reason == Reason.ALREADY_REGISTERED
    assert "deployment_id" in str(error.violations)
    promoted = await deploying.promote(f"{P}/versions/1", request_id="p")
    await deploying.promote(f"{P}/versions/2")
    assert await deploying.promote(f"{P}/versions/1", request_id="p") == promoted
    assert (await deploying.get()).model == f"{P}/versions/2"


async def test_a_replay_is_answered_though_the_model_is_gone(deploying: Deploying) -> None:
    first = await deploying.create(model=f"{P}/versions/1", request_id="r")
    await deploying.delete()
    stub = deploying.rig.catalog
    await stub.DeletePolicy(pb.DeletePolicyRequest(name=P, request_id="d"))
    assert await deploying.create(model=f"{P}/versions/1", request_id="r") == first


REFUSED: list[tuple[dict[str, Any], Reason, str]] = [
    ({"deployment_id": "Not An Id"}, Reason.INVALID_FIELD, "deployment_id"),
    ({"deployment_id": "x" * 64}, Reason.INVALID_FIELD, "deployment_id"),
    ({"model": "policies/none"}, Reason.POLICY_NOT_FOUND, ""),
    ({"model": f"{P}/versions/9"}, Reason.VERSION_NOT_FOUND, ""),
    ({"model": f"{P}/checkpoints/c9"}, Reason.CHECKPOINT_NOT_FOUND, ""),
    ({"model": "models/unheard-of"}, Reason.UNKNOWN_MODEL, "deployment.model"),
    ({"model": "some-model"}, Reason.INVALID_FIELD, "deployment.model"),
    ({"model": "models/"}, Reason.INVALID_FIELD, "deployment.model"),
    ({"replicas": 0}, Reason.INVALID_FIELD, "deployment.replicas"),
    ({"replicas": 1000}, Reason.CANNOT_BE_SATISFIED, ""),
    ({"options": job_pb2.ServerOptions(engine="abacus")}, Reason.INVALID_FIELD, "options.engine"),
    (
        {"options": job_pb2.ServerOptions(engine="noop", max_lora_rank=999)},
        Reason.CANNOT_BE_SATISFIED,
        "deployment.options.max_lora_rank",
    ),
    (
        {"options": job_pb2.ServerOptions(engine="noop", max_lora_rank=8)},
        Reason.UNSUPPORTED_COMBINATION,
        "model",
    ),
]


async def test_what_cannot_be_deployed(deploying: Deploying) -> None:
    for fields, reason, field in REFUSED:
        error = await refused(deploying.create(**fields))
        assert error.reason == reason, fields
        assert field in str(error.violations), fields
    listed = await deploying.stub.ListDeployments(pb.ListDeploymentsRequest())
    assert not listed.deployments


async def test_other_base_models_need_their_own_deployment(deploying: Deploying) -> None:
    await deploying.create()
    error = await refused(deploying.promote("models/other-model"))
    assert error.reason == Reason.UNSUPPORTED_COMBINATION
    assert "other-model" in error.message
    assert "some-model" in error.message
    await trained(deploying.rig, rank=64, name="policies/wide")
    error = await refused(deploying.promote("policies/wide"))
    assert error.reason == Reason.UNSUPPORTED_COMBINATION
    assert "64" in error.message
    assert "32" in error.message
    assert (await deploying.get()).model == f"{P}/versions/2"


async def test_deleting_frees_the_servers_and_the_name(deploying: Deploying) -> None:
    await deploying.create()
    job = (await deploying.until(SERVING)).job
    await deploying.delete()
    assert (await deploying.rig.job(job)).state == job_pb2.JOB_STATE_CANCELLED
    for call in (deploying.get(), deploying.resolve("deployments/guesser"), deploying.delete()):
        assert (await refused(call)).reason == Reason.DEPLOYMENT_NOT_FOUND
    assert (await deploying.create()).job != job


async def test_a_deployment_outlives_its_scheduler(start_rig: Any) -> None:
    rig = await start_rig()
    await trained(rig)
    await Deploying(rig).create()
    await Deploying(rig).until(SERVING)
    await rig.stop()
    rig = await start_rig()
    deploying = Deploying(rig)
    serving = await deploying.until(SERVING)
    assert (await rig.job(serving.job)).attempt == 2
    assert len((await deploying.resolve("guesser")).endpoints) == 1


async def test_a_deployment_whose_servers_die_fails_and_is_started_again_by_promoting(
    start_rig: Any,
) -> None:
    rig = await start_rig(behavior="exit:7", crash_limit=2)
    await trained(rig)
    deploying = Deploying(rig)
    await deploying.create()
    failed = await deploying.until(FAILED)
    assert "exited with code 7" in failed.error.message
    error = await refused(deploying.resolve("guesser"))
    assert error.reason == Reason.INVALID_STATE
    assert "exited with code 7" in error.message
    again = await deploying.promote(failed.model)
    assert again.job != failed.job
    assert again.model == failed.model
    assert not again.previous_models


async def test_a_cancelled_job_is_named(deploying: Deploying) -> None:
    await deploying.create()
    job = (await deploying.until(SERVING)).job
    await deploying.rig.jobs.CancelJob(jobs_pb.CancelJobRequest(name=job, request_id="c"))
    assert "CancelJob" in (await deploying.until(FAILED)).state_reason


async def test_a_paused_deployment_says_how_it_goes_on(deploying: Deploying) -> None:
    await deploying.create()
    job = (await deploying.until(SERVING)).job
    await deploying.rig.jobs.PauseJob(jobs_pb.PauseJobRequest(name=job, request_id="p"))
    await deploying.until(deployment_pb2.DEPLOYMENT_STATE_PAUSED)
    error = await refused(deploying.resolve("guesser"))
    assert error.reason == Reason.INVALID_STATE
    assert f"ResumeJob of {job}" in error.message
    await deploying.rig.jobs.ResumeJob(jobs_pb.ResumeJobRequest(name=job, request_id="r"))
    await deploying.until(SERVING)


async def test_what_is_deployed_is_not_deleted(deploying: Deploying) -> None:
    stub = deploying.rig.catalog
    await deploying.create(model=f"{P}/checkpoints/c1")
    await deploying.promote(P)

    def deletion() -> Any:
        return stub.DeleteCheckpoint(
            pb.DeleteCheckpointRequest(name=f"{P}/checkpoints/c1", request_id=deploying.rig.request_id())
        )

    error = await refused(deletion())
    assert error.reason == Reason.INVALID_STATE
    assert error.metadata["deployment"] == "deployments/guesser"
    error = await refused(stub.DeletePolicy(pb.DeletePolicyRequest(name=P, request_id="d")))
    assert error.reason == Reason.INVALID_STATE
    # Ten versions later, of which two are kept, the one that is served is there still.
    for number in range(3, 13):
        version = policy_pb2.PolicyVersion(version=number, sha256=B, manifest_key="m")
        await stub.RegisterVersion(pb.RegisterVersionRequest(policy=P, version=version, keep_versions=2))
    left = await stub.ListVersions(pb.ListVersionsRequest(policy=P))
    assert [version.version for version in left.versions] == [12, 11, 2, 0]
    await deploying.promote(P)
    await deploying.promote(f"{P}/versions/0")
    await deletion()


async def test_names_of_models(deploying: Deploying) -> None:
    resolve = deploying.resolve
    base = await resolve("some-model")
    assert (base.model, base.model_ref.base_model) == ("models/some-model", "some-model")
    assert await resolve("models/some-model") == base
    assert (base.slot.role, base.slot.base_model, list(base.endpoints)) == (INFERENCE, "some-model", [])
    newest = await resolve(P)
    assert (newest.model, newest.base_model) == (f"{P}/versions/2", "some-model")
    assert newest.model_ref.policy_version.policy == P
    assert newest.slot.options.max_lora_rank == 32
    assert (await resolve(f"{P}/versions/1")).model_ref.policy_version.version == 1
    assert (await resolve(f"{P}/checkpoints/c1")).model_ref.checkpoint == f"{P}/checkpoints/c1"
    await deploying.create("other-model")
    assert (await resolve("other-model")).deployment == "deployments/other-model"
    assert not (await resolve("models/other-model")).deployment
    error = await refused(resolve("nobody"))
    assert error.reason == Reason.UNKNOWN_MODEL
    assert "some-model" in error.message
    assert "deployments are: other-model" in error.message
    for name, reason in (
        ("deployments/none", Reason.DEPLOYMENT_NOT_FOUND),
        ("deployments/a/b", Reason.DEPLOYMENT_NOT_FOUND),
        ("policies/none", Reason.POLICY_NOT_FOUND),
        (f"{P}/versions/x", Reason.VERSION_NOT_FOUND),
        (f"{P}/checkpoints/..", Reason.VERSION_NOT_FOUND),
        ("models/none", Reason.UNKNOWN_MODEL),
    ):
        assert (await refused(resolve(name))).reason == reason, name


@pytest.mark.parametrize(("mode", "older"), [("adapter", 1), ("merged", 0)])
async def test_a_policy_in_training_is_served_by_its_own_job(
    rig: Any, make_slot: Any, mode: str, older: int
) -> None:
    """Where merging the older version would disturb who trains, it is not."""
    job = await rig.create_job(make_slot(), make_slot(INFERENCE, serving_mode=mode))
    await rig.until(job.name, RUNNING)
    await trained(rig, job.name)
    deploying = Deploying(rig)
    newest = await deploying.resolve(P)
    assert [endpoint.role for endpoint in newest.endpoints] == [INFERENCE]
    assert newest.job == job.name
    assert len((await deploying.resolve(f"{P}/versions/1")).endpoints) == older
    made = await deploying.create(options=job_pb2.ServerOptions())
    assert made.options.serving_mode == mode


async def test_deployments_are_listed_newest_first(deploying: Deploying) -> None:
    for name in ("one", "two", "three"):
        await deploying.create(name)
    request = pb.ListDeploymentsRequest(page_size=2)
    page = await deploying.stub.ListDeployments(request)
    assert [made.name for made in page.deployments] == ["deployments/three", "deployments/two"]
    request.page_token = page.next_page_token
    rest = await deploying.stub.ListDeployments(request)
    assert [made.name for made in rest.deployments] == ["deployments/one"]
    request.page_token = "made-up"
    assert (await refused(deploying.stub.ListDeployments(request))).reason == Reason.INVALID_PAGE_TOKEN
