"""The access matrix: a row for each RPC, by hand, so that a new one is thought about. Here the scheduler's.

A row says who may call the RPC, how it is asked about what project A owns, and what project B is told then.
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from google.protobuf.message import Message

from opentinkerapi.catalog.v1 import catalog_service_pb2 as catalog
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.data.v1 import blob_pb2
from opentinkerapi.run.v1 import blob_service_pb2 as blobs
from opentinkerapi.run.v1 import run_pb2
from opentinkerapi.run.v1 import run_service_pb2 as runs
from opentinkerapi.scheduler.v1 import account_pb2, job_pb2
from opentinkerapi.scheduler.v1 import account_service_pb2 as accounts
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as jobs
from opentinkerapi.scheduler.v1 import server_registry_service_pb2 as registry
from tests.contract.access_world import DATA, SHARED_SHA, World

VIEWER, MEMBER, ADMIN = "viewer", "member", "admin"
CLUSTER = "cluster"
"""Admins of the project that a cluster begins with."""
SERVICE = "service"
JOB = "job"
"""Who shows a job's token."""
HIDES_NOTHING = ""
"""B is answered, with nothing of A's in it."""


@dataclass(frozen=True)
class Row:
    """One RPC."""

    who: str
    """The least that a caller must be."""
    ask: Callable[[World], Message]
    """The request, naming what A owns."""
    told: str = HIDES_NOTHING
    """The reason that B is refused with."""
    sibling: str | None = None
    """With the token of another job of A; None: as B."""
    changes: bool = False
    """A's things would not be the same afterwards: who may call it is asked about what does not exist."""


def named(tables: Mapping[str, Mapping[str, Row]]) -> dict[str, Row]:
    """Rows by service and method."""
    return {f"{service}.{method}": row for service, rows in tables.items() for method, row in rows.items()}


def _id() -> str:
    return uuid.uuid4().hex


def _blob(sha256: str) -> blob_pb2.BlobRef:
    return blob_pb2.BlobRef(sha256=sha256)


def _job(w: World) -> job_pb2.Job:
    slot = job_pb2.SlotSpec(role=job_pb2.SLOT_ROLE_TRAINER, base_model=w.model)
    return job_pb2.Job(kind=job_pb2.JOB_KIND_LORA_RL, slots=[slot], run=w.run)


def _groups(w: World) -> runs.PutGroupsRequest:
    record = run_pb2.GroupsRecord(step=1, blob=_blob(SHARED_SHA))
    return runs.PutGroupsRequest(run=w.run, request_id=_id(), groups=record)


def _artifact(w: World) -> runs.PutArtifactRequest:
    artifact = run_pb2.Artifact(name="a.txt", blob=_blob(SHARED_SHA))
    return runs.PutArtifactRequest(run=w.run, request_id=_id(), artifact=artifact)


def _registered(w: World) -> registry.RegisterServerRequest:
    # Without slots it is refused, before it could be given jobs.
    return registry.RegisterServerRequest(
        instance_id=_id(),
        role=job_pb2.SLOT_ROLE_TRAINER,
        base_model=w.model,
        advertise_address="127.0.0.1:1",
    )


def _policy(w: World) -> catalog.RegisterPolicyRequest:
    tuning = policy_pb2.Tuning(lora=policy_pb2.LoraTuning(rank=4))
    policy = policy_pb2.Policy(name="policies/p9", base_model=w.model, tuning=tuning, job=w.job)
    return catalog.RegisterPolicyRequest(request_id=_id(), policy=policy)


def _deployment(w: World) -> catalog.CreateDeploymentRequest:
    request = catalog.CreateDeploymentRequest(request_id=_id(), deployment_id=f"d{_id()[:8]}")
    request.deployment.model = w.policy
    return request


_SCHEDULER: Mapping[str, Row] = {
    "CreateJob": Row(
        MEMBER, lambda w: jobs.CreateJobRequest(request_id=_id(), job=_job(w)), "INVALID_FIELD", changes=True
    ),
    "GetJob": Row(VIEWER, lambda w: jobs.GetJobRequest(name=w.job), "JOB_NOT_FOUND"),
    "ListJobs": Row(VIEWER, lambda w: jobs.ListJobsRequest()),
    "WatchJob": Row(VIEWER, lambda w: jobs.WatchJobRequest(name=w.job), "JOB_NOT_FOUND"),
    "FinishJob": Row(
        MEMBER,
        lambda w: jobs.FinishJobRequest(name=w.job, request_id=_id(), outcome=job_pb2.JOB_STATE_SUCCEEDED),
        "JOB_NOT_FOUND",
        changes=True,
    ),
    "CancelJob": Row(
        MEMBER, lambda w: jobs.CancelJobRequest(name=w.job, request_id=_id()), "JOB_NOT_FOUND", changes=True
    ),
    "PauseJob": Row(
        MEMBER, lambda w: jobs.PauseJobRequest(name=w.job, request_id=_id()), "JOB_NOT_FOUND", changes=True
    ),
    "ResumeJob": Row(
        MEMBER, lambda w: jobs.ResumeJobRequest(name=w.job, request_id=_id()), "JOB_NOT_FOUND", changes=True
    ),
    "RenewJobLease": Row(MEMBER, lambda w: jobs.RenewJobLeaseRequest(name=w.job), "JOB_NOT_FOUND"),
    "GetCluster": Row(VIEWER, lambda w: jobs.GetClusterRequest()),
    "ListServers": Row(VIEWER, lambda w: jobs.ListServersRequest()),
    "ReadLogs": Row(VIEWER, lambda w: jobs.ReadLogsRequest(name=w.job), "JOB_NOT_FOUND"),
}

_REGISTRY: Mapping[str, Row] = {
    "RegisterServer": Row(SERVICE, _registered, changes=True),
    "ServerSession": Row(
        SERVICE,
        lambda w: registry.ServerSessionRequest(
            hello=registry.SessionHello(server="servers/none", attempt=1)
        ),
        changes=True,
    ),
    "DeregisterServer": Row(
        SERVICE, lambda w: registry.DeregisterServerRequest(server="servers/none", attempt=1), changes=True
    ),
}

_ACCOUNTS: Mapping[str, Row] = {
    "GetCaller": Row(VIEWER, lambda w: accounts.GetCallerRequest()),
    "CreateUser": Row(
        CLUSTER,
        lambda w: accounts.CreateUserRequest(request_id=_id(), user=account_pb2.User(display_name=_id())),
        "PERMISSION_DENIED",
    ),
    "ListUsers": Row(CLUSTER, lambda w: accounts.ListUsersRequest(), "PERMISSION_DENIED"),
    "UpdateUser": Row(
        CLUSTER,
        lambda w: accounts.UpdateUserRequest(request_id=_id(), name=w.user),
        "PERMISSION_DENIED",
    ),
    "CreateProject": Row(
        CLUSTER,
        lambda w: accounts.CreateProjectRequest(
            request_id=_id(), project=account_pb2.Project(display_name=_id())
        ),
        "PERMISSION_DENIED",
    ),
    "ListProjects": Row(VIEWER, lambda w: accounts.ListProjectsRequest()),
    "SetMember": Row(
        ADMIN,
        lambda w: accounts.SetMemberRequest(
            request_id=_id(), project=w.project, user=w.user, role=account_pb2.ROLE_ADMIN
        ),
        "PROJECT_NOT_FOUND",
    ),
    "RemoveMember": Row(
        ADMIN,
        lambda w: accounts.RemoveMemberRequest(request_id=_id(), project=w.project, user=w.user),
        "PROJECT_NOT_FOUND",
        changes=True,
    ),
    "ListMembers": Row(VIEWER, lambda w: accounts.ListMembersRequest(project=w.project), "PROJECT_NOT_FOUND"),
    "CreateApiKey": Row(
        MEMBER,
        lambda w: accounts.CreateApiKeyRequest(request_id=_id(), project=w.project),
        "PROJECT_NOT_FOUND",
    ),
    "ListApiKeys": Row(VIEWER, lambda w: accounts.ListApiKeysRequest(project=w.project), "PROJECT_NOT_FOUND"),
    "RevokeApiKey": Row(
        MEMBER,
        lambda w: accounts.RevokeApiKeyRequest(request_id=_id(), name=w.api_key),
        "API_KEY_NOT_FOUND",
        changes=True,
    ),
    "ListUsage": Row(VIEWER, lambda w: accounts.ListUsageRequest(project=w.project), "PROJECT_NOT_FOUND"),
    "ListAuditEntries": Row(
        ADMIN, lambda w: accounts.ListAuditEntriesRequest(project=w.project), "PROJECT_NOT_FOUND"
    ),
    "ListTokenKeys": Row(VIEWER, lambda w: accounts.ListTokenKeysRequest()),
    "ResolveApiKey": Row(SERVICE, lambda w: accounts.ResolveApiKeyRequest(sha256=b"x" * 32), changes=True),
}

_CATALOG: Mapping[str, Row] = {
    "RegisterPolicy": Row(SERVICE, _policy, changes=True),
    "RegisterVersion": Row(
        SERVICE,
        lambda w: catalog.RegisterVersionRequest(
            policy=w.policy, version=policy_pb2.PolicyVersion(version=9)
        ),
        changes=True,
    ),
    "RegisterCheckpoint": Row(
        SERVICE,
        lambda w: catalog.RegisterCheckpointRequest(
            policy=w.policy, checkpoint=policy_pb2.Checkpoint(name=f"{w.policy}/checkpoints/c9")
        ),
        changes=True,
    ),
    "GetPolicy": Row(VIEWER, lambda w: catalog.GetPolicyRequest(name=w.policy), "POLICY_NOT_FOUND"),
    "ListPolicies": Row(VIEWER, lambda w: catalog.ListPoliciesRequest(job=w.job)),
    "DeletePolicy": Row(
        MEMBER,
        lambda w: catalog.DeletePolicyRequest(name=w.policy, request_id=_id()),
        "POLICY_NOT_FOUND",
        changes=True,
    ),
    "GetVersion": Row(
        VIEWER, lambda w: catalog.GetVersionRequest(name=f"{w.policy}/versions/0"), "VERSION_NOT_FOUND"
    ),
    "ListVersions": Row(VIEWER, lambda w: catalog.ListVersionsRequest(policy=w.policy), "POLICY_NOT_FOUND"),
    "GetCheckpoint": Row(
        VIEWER, lambda w: catalog.GetCheckpointRequest(name=w.checkpoint), "CHECKPOINT_NOT_FOUND"
    ),
    "ListCheckpoints": Row(
        VIEWER, lambda w: catalog.ListCheckpointsRequest(policy=w.policy), "POLICY_NOT_FOUND"
    ),
    "ExportWeights": Row(
        VIEWER, lambda w: catalog.ExportWeightsRequest(name=w.checkpoint), "CHECKPOINT_NOT_FOUND"
    ),
    "DeleteCheckpoint": Row(
        MEMBER,
        lambda w: catalog.DeleteCheckpointRequest(name=w.checkpoint, request_id=_id()),
        "CHECKPOINT_NOT_FOUND",
        changes=True,
    ),
    "CreateDeployment": Row(MEMBER, _deployment, "POLICY_NOT_FOUND", changes=True),
    "GetDeployment": Row(
        VIEWER, lambda w: catalog.GetDeploymentRequest(name=w.deployment), "DEPLOYMENT_NOT_FOUND"
    ),
    "ListDeployments": Row(VIEWER, lambda w: catalog.ListDeploymentsRequest()),
    "PromoteDeployment": Row(
        MEMBER,
        lambda w: catalog.PromoteDeploymentRequest(name=w.deployment, request_id=_id(), model=w.policy),
        "DEPLOYMENT_NOT_FOUND",
        changes=True,
    ),
    "RollBackDeployment": Row(
        MEMBER,
        lambda w: catalog.RollBackDeploymentRequest(name=w.deployment, request_id=_id()),
        "DEPLOYMENT_NOT_FOUND",
        changes=True,
    ),
    "DeleteDeployment": Row(
        MEMBER,
        lambda w: catalog.DeleteDeploymentRequest(name=w.deployment, request_id=_id()),
        "DEPLOYMENT_NOT_FOUND",
        changes=True,
    ),
    "ResolveModel": Row(VIEWER, lambda w: catalog.ResolveModelRequest(name=w.policy), "POLICY_NOT_FOUND"),
}

_RUNS: Mapping[str, Row] = {
    "CreateRun": Row(
        MEMBER,
        lambda w: runs.CreateRunRequest(request_id=_id(), run=run_pb2.Run(job=w.job)),
        "INVALID_FIELD",
    ),
    "GetRun": Row(VIEWER, lambda w: runs.GetRunRequest(name=w.run), "RUN_NOT_FOUND"),
    "ListRuns": Row(VIEWER, lambda w: runs.ListRunsRequest()),
    "UpdateRun": Row(MEMBER, lambda w: runs.UpdateRunRequest(name=w.run, request_id=_id()), "RUN_NOT_FOUND"),
    "AppendMetrics": Row(
        MEMBER,
        lambda w: runs.AppendMetricsRequest(run=w.run, rows=[run_pb2.MetricsRow(step=1, values={"x": 1.0})]),
        "RUN_NOT_FOUND",
    ),
    "ListMetrics": Row(VIEWER, lambda w: runs.ListMetricsRequest(run=w.run), "RUN_NOT_FOUND"),
    "PutLoopState": Row(
        MEMBER,
        lambda w: runs.PutLoopStateRequest(run=w.run, request_id=_id(), loop_state=run_pb2.LoopState(step=1)),
        "RUN_NOT_FOUND",
    ),
    "GetLoopState": Row(VIEWER, lambda w: runs.GetLoopStateRequest(run=w.run), "RUN_NOT_FOUND"),
    "PutGroups": Row(MEMBER, _groups, "RUN_NOT_FOUND"),
    "ListGroups": Row(VIEWER, lambda w: runs.ListGroupsRequest(run=w.run), "RUN_NOT_FOUND"),
    "PutArtifact": Row(MEMBER, _artifact, "RUN_NOT_FOUND"),
    "ListArtifacts": Row(VIEWER, lambda w: runs.ListArtifactsRequest(run=w.run), "RUN_NOT_FOUND"),
}

_BLOBS: Mapping[str, Row] = {
    "CreateUpload": Row(
        MEMBER, lambda w: blobs.CreateUploadRequest(sha256=w.blob, size_bytes=len(DATA)), HIDES_NOTHING
    ),
    "GetDownload": Row(VIEWER, lambda w: blobs.GetDownloadRequest(blob=_blob(w.blob)), "BLOB_NOT_FOUND"),
}

ROWS: Mapping[str, Row] = named(
    {
        "SchedulerService": _SCHEDULER,
        "ServerRegistryService": _REGISTRY,
        "AccountService": _ACCOUNTS,
        "CatalogService": _CATALOG,
        "RunService": _RUNS,
        "BlobService": _BLOBS,
    }
)
