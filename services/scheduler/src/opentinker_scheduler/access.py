"""Who may call which method of the scheduler, and which calls the audit log keeps.

A method that is not named here may be called by nobody; a test wants every one named.
"""

from collections.abc import Mapping

from opentinker_kit.auth import Access, Kind
from opentinker_kit.interceptors import EndedCall
from opentinkerapi.catalog.v1 import catalog_service_pb2
from opentinkerapi.run.v1 import blob_service_pb2, run_service_pb2
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import (
    account_service_pb2,
    scheduler_service_pb2,
    server_registry_service_pb2,
)

SERVICES = (
    scheduler_service_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
    server_registry_service_pb2.DESCRIPTOR.services_by_name["ServerRegistryService"],
    account_service_pb2.DESCRIPTOR.services_by_name["AccountService"],
    catalog_service_pb2.DESCRIPTOR.services_by_name["CatalogService"],
    run_service_pb2.DESCRIPTOR.services_by_name["RunService"],
    blob_service_pb2.DESCRIPTOR.services_by_name["BlobService"],
)

_READS = """
    GetJob ListJobs WatchJob GetCluster ListServers ReadLogs
    GetCaller ListProjects ListMembers ListApiKeys ListTokenKeys ListUsage
    GetPolicy ListPolicies GetVersion ListVersions GetCheckpoint ListCheckpoints ExportWeights
    GetDeployment ListDeployments ResolveModel
    GetRun ListRuns ListMetrics GetLoopState ListGroups ListArtifacts GetDownload
"""
_WRITES = """
    CreateJob FinishJob CancelJob PauseJob ResumeJob RenewJobLease
    CreateApiKey RevokeApiKey
    DeletePolicy DeleteCheckpoint CreateDeployment PromoteDeployment RollBackDeployment DeleteDeployment
    CreateRun UpdateRun AppendMetrics PutLoopState PutGroups PutArtifact CreateUpload
"""
_MANAGES = "CreateUser ListUsers UpdateUser CreateProject SetMember RemoveMember ListAuditEntries"
_OWN_SERVERS = """
    RegisterServer ServerSession DeregisterServer ResolveApiKey
    RegisterPolicy RegisterVersion RegisterCheckpoint
"""
_BY_NAME: Mapping[str, Access] = {
    **dict.fromkeys(_READS.split(), Access.CALLER),
    **dict.fromkeys(_WRITES.split(), Access.MEMBER),
    **dict.fromkeys(_MANAGES.split(), Access.ADMIN),
    **dict.fromkeys(_OWN_SERVERS.split(), Access.SERVICE),
}
_ROUTINE = frozenset(
    {"RenewJobLease", "AppendMetrics", "ListUsers", "ListAuditEntries", "ServerSession", "ResolveApiKey"}
)
"""Calls above a read that change nothing an auditor asks about, and come all the time."""
_REFUSED = frozenset({Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED})


def access_table() -> Mapping[str, Access]:
    """Who may call which method, by its full name."""
    return {
        f"/{service.full_name}/{method.name}": _BY_NAME[method.name]
        for service in SERVICES
        for method in service.methods
        if method.name in _BY_NAME
    }


def is_audited(call: EndedCall) -> bool:
    """Whether the audit log keeps a call: what may have changed something, and what was not allowed.

    Of our own servers only those that join and leave: what trainers register is in the catalog.
    """
    name = call.method.rpartition("/")[2]
    if call.outcome in _REFUSED:
        return True
    if name in ("RegisterServer", "DeregisterServer"):
        return True
    if call.principal is None or call.principal.kind is Kind.SERVICE or name in _ROUTINE:
        return False
    return _BY_NAME.get(name) in (Access.MEMBER, Access.ADMIN)
