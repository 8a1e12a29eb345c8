"""Accounts and audit entries as messages."""

from collections.abc import Mapping
from datetime import UTC
from typing import Any

from opentinker_kit.accounts import ROLES
from opentinker_kit.auth import Principal, Role
from opentinker_kit.errors import ServiceError
from opentinker_scheduler.account_ports import AuditFilter
from opentinker_scheduler.application.accounts import NewKey
from opentinker_scheduler.domain.accounts import ApiKey, AuditEntry, Member, Project, User
from opentinker_scheduler.domain.prices import HOUR_S, Prices
from opentinker_scheduler.domain.shares import Used
from opentinker_scheduler.wire.jobs import read_enum, timestamp
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import account_pb2
from opentinkerapi.scheduler.v1 import account_service_pb2 as pb

_ROLE_OUT: Mapping[Role, "account_pb2.Role.ValueType"] = {
    Role.VIEWER: account_pb2.ROLE_VIEWER,
    Role.MEMBER: account_pb2.ROLE_MEMBER,
    Role.ADMIN: account_pb2.ROLE_ADMIN,
}
_NAMING = ("name", "job", "run", "policy", "deployment_id", "user", "project", "sha256", "server")
"""Fields of requests that say what a call is about, the most telling first."""


def read_role(role: int, field: str) -> Role:
    return read_enum(ROLES, role, field, "role")


def read_new_key(request: pb.CreateApiKeyRequest) -> NewKey:
    return NewKey(
        project=request.project,
        user=request.user,
        role=read_role(request.role, "role") if request.role else None,
        display_name=request.display_name,
        ttl=request.ttl.ToTimedelta() if request.HasField("ttl") else None,
    )


def read_filter(request: pb.ListAuditEntriesRequest, project: str | None) -> AuditFilter:
    start = request.start_time.ToDatetime(UTC) if request.HasField("start_time") else None
    return AuditFilter(project, request.caller, request.method, start)


def filter_text(asked: AuditFilter) -> str:
    """What a page token of such a list is for."""
    return f"{asked.project}|{asked.caller}|{asked.method}|{asked.start_time}"


def write_user(user: User) -> account_pb2.User:
    return account_pb2.User(
        name=user.name,
        display_name=user.display_name,
        disabled=user.disabled,
        create_time=timestamp(user.create_time),
    )


def write_project(project: Project) -> account_pb2.Project:
    return account_pb2.Project(
        name=project.name, display_name=project.display_name, create_time=timestamp(project.create_time)
    )


def write_member(member: Member) -> account_pb2.Member:
    return account_pb2.Member(
        project=f"projects/{member.project}", user=f"users/{member.user_id}", role=_ROLE_OUT[member.role]
    )


def write_key(key: ApiKey) -> account_pb2.ApiKey:
    return account_pb2.ApiKey(
        name=key.name,
        project=f"projects/{key.project}",
        user=f"users/{key.user_id}",
        role=_ROLE_OUT[key.role],
        display_name=key.display_name,
        create_time=timestamp(key.create_time),
        expire_time=None if key.expire_time is None else timestamp(key.expire_time),
        revoke_time=None if key.revoke_time is None else timestamp(key.revoke_time),
    )


def write_caller(who: Principal) -> pb.GetCallerResponse:
    return pb.GetCallerResponse(
        caller=who.caller,
        project=f"projects/{who.project}",
        role=_ROLE_OUT[who.role],
        api_key=f"apiKeys/{who.api_key}" if who.api_key else "",
        cluster_admin=who.is_cluster_admin,
    )


def write_entry(entry: AuditEntry) -> account_pb2.AuditEntry:
    return account_pb2.AuditEntry(
        time=timestamp(entry.time),
        project=f"projects/{entry.project}" if entry.project else "",
        caller=entry.caller,
        api_key=entry.api_key,
        method=entry.method,
        resource=entry.resource,
        outcome=entry.outcome,
        peer=entry.peer,
    )


def is_by_job(group: "pb.UsageGroup.ValueType") -> bool:
    """Whether rows of usage are jobs, and not days."""
    groups = {pb.USAGE_GROUP_UNSPECIFIED: False, pb.USAGE_GROUP_DAY: False, pb.USAGE_GROUP_JOB: True}
    return read_enum(groups, group, "group", "usage group")


def write_usage(
    project: str, used: Used, *, prices: Prices, day: str = "", job: str = ""
) -> account_pb2.Usage:
    return account_pb2.Usage(
        project=f"projects/{project}",
        date=day,
        job=f"jobs/{job}" if job else "",
        slot_hours=used.slot_seconds / HOUR_S,
        gpu_hours=used.gpu_seconds / HOUR_S,
        price=prices.of(used),
        tokens_trained=used.tokens_trained,
        tokens_sampled=used.tokens_sampled,
    )


def resource_of(request: Any, response: Any) -> str:
    """What a call was about: the one thing that its answer shows, else what its request names."""
    if response is not None:
        for field, value in response.ListFields():
            kind = None if field.is_repeated else field.message_type
            if kind is not None and "name" in kind.fields_by_name and value.name:
                return str(value.name)
    if request is not None:
        fields = request.DESCRIPTOR.fields_by_name
        for name in _NAMING:
            if name in fields and isinstance(value := getattr(request, name), str) and value:
                return value
    return ""


def check_sha256(sha256: bytes) -> bytes:
    if len(sha256) != 32:
        raise ServiceError(Reason.INVALID_FIELD, "sha256 must have 32 bytes", field="sha256")
    return sha256
