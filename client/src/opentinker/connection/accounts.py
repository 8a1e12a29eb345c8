"""Users, projects and keys of a cluster, by the names that people give them."""

import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar

import grpc.aio

from opentinker import errors
from opentinker.connection.calls import ControlPlane
from opentinkerapi.scheduler.v1 import account_pb2
from opentinkerapi.scheduler.v1 import account_service_pb2 as pb
from opentinkerapi.scheduler.v1.account_service_pb2_grpc import AccountServiceStub

T = TypeVar("T")

ROLES: dict[str, "account_pb2.Role.ValueType"] = {
    "viewer": account_pb2.ROLE_VIEWER,
    "member": account_pb2.ROLE_MEMBER,
    "admin": account_pb2.ROLE_ADMIN,
}
ROLE_WORDS = {value: word for word, value in ROLES.items()}
_PAGE = 1000


class Accounts:
    """The account service of a cluster. Everything here runs on the client's loop.

    A user or project is named as the service names it (`users/u12`) or as people do.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def caller(self) -> pb.GetCallerResponse:
        """Who this client is."""
        return await self._call(lambda stub: stub.GetCaller(pb.GetCallerRequest()))

    async def create_user(self, name: str) -> account_pb2.User:
        request = pb.CreateUserRequest(request_id=_id(), user=account_pb2.User(display_name=name))
        answer: pb.CreateUserResponse = await self._call(lambda stub: stub.CreateUser(request))
        return answer.user

    async def users(self) -> list[account_pb2.User]:
        return await self._pages("ListUsers", pb.ListUsersRequest(), "users")

    async def disable_user(self, user: str, *, disabled: bool) -> account_pb2.User:
        name = await self._user(user)
        request = pb.UpdateUserRequest(request_id=_id(), name=name, disabled=disabled)
        answer: pb.UpdateUserResponse = await self._call(lambda stub: stub.UpdateUser(request))
        return answer.user

    async def create_project(self, name: str) -> account_pb2.Project:
        project = account_pb2.Project(display_name=name)
        request = pb.CreateProjectRequest(request_id=_id(), project=project)
        answer: pb.CreateProjectResponse = await self._call(lambda stub: stub.CreateProject(request))
        return answer.project

    async def projects(self) -> list[account_pb2.Project]:
        return await self._pages("ListProjects", pb.ListProjectsRequest(), "projects")

    async def set_member(self, project: str, user: str, role: str) -> account_pb2.Member:
        request = pb.SetMemberRequest(
            request_id=_id(),
            project=await self._project(project),
            user=await self._user(user),
            role=_role(role),
        )
        answer: pb.SetMemberResponse = await self._call(lambda stub: stub.SetMember(request))
        return answer.member

    async def remove_member(self, project: str, user: str) -> None:
        name, member = await self._project(project), await self._user(user)
        request = pb.RemoveMemberRequest(request_id=_id(), project=name, user=member)
        await self._call(lambda stub: stub.RemoveMember(request))

    async def members(self, project: str) -> list[account_pb2.Member]:
        request = pb.ListMembersRequest(project=await self._project(project))
        return await self._pages("ListMembers", request, "members")

    async def create_key(
        self, *, project: str, user: str, role: str, name: str, ttl: timedelta | None
    ) -> pb.CreateApiKeyResponse:
        """A key, in the answer and nowhere else."""
        request = pb.CreateApiKeyRequest(
            request_id=_id(),
            project=await self._project(project),
            user=await self._user(user) if user else "",
            display_name=name,
        )
        if role:
            request.role = _role(role)
        if ttl is not None:
            request.ttl.FromTimedelta(ttl)
        return await self._call(lambda stub: stub.CreateApiKey(request))

    async def keys(self, project: str) -> list[account_pb2.ApiKey]:
        request = pb.ListApiKeysRequest(project=await self._project(project))
        return await self._pages("ListApiKeys", request, "api_keys")

    async def revoke_key(self, name: str) -> account_pb2.ApiKey:
        full = name if name.startswith("apiKeys/") else f"apiKeys/{name}"
        request = pb.RevokeApiKeyRequest(request_id=_id(), name=full)
        answer: pb.RevokeApiKeyResponse = await self._call(lambda stub: stub.RevokeApiKey(request))
        return answer.api_key

    async def audit(self, project: str, limit: int) -> list[account_pb2.AuditEntry]:
        """The newest entries of the audit log."""
        request = pb.ListAuditEntriesRequest(
            project=await self._project(project), page_size=min(limit, _PAGE)
        )
        return await self._pages("ListAuditEntries", request, "entries", limit)

    async def usage(self, project: str, limit: int, *, by_job: bool) -> list[account_pb2.Usage]:
        """What a project used, by day or by job, newest first."""
        request = pb.ListUsageRequest(
            project=await self._project(project),
            group=pb.USAGE_GROUP_JOB if by_job else pb.USAGE_GROUP_DAY,
            page_size=min(limit, _PAGE),
        )
        return await self._pages("ListUsage", request, "usage", limit)

    async def _user(self, text: str) -> str:
        if text.startswith("users/"):
            return text
        found = [user.name for user in await self.users() if user.display_name == text]
        return _one(found, "user", text)

    async def _project(self, text: str) -> str:
        """The project's name; of no text none, which is the caller's own."""
        if not text or text.startswith("projects/"):
            return text
        found = [project.name for project in await self.projects() if project.display_name == text]
        return _one(found, "project", text)

    async def _pages(self, method: str, request: Any, items: str, limit: int | None = None) -> list[Any]:
        found: list[Any] = []
        while True:
            if not request.page_size:
                request.page_size = _PAGE
            answer = await self._call(lambda stub: getattr(stub, method)(request))
            found += getattr(answer, items)
            if not answer.next_page_token or (limit is not None and len(found) >= limit):
                return found[:limit]
            request.page_token = answer.next_page_token

    async def _call(self, method: Callable[[Any], Awaitable[T]]) -> T:
        def call(channel: grpc.aio.Channel) -> Awaitable[T]:
            return method(AccountServiceStub(channel))

        return await self._control.call(call)


def _id() -> str:
    return uuid.uuid4().hex


def _role(word: str) -> "account_pb2.Role.ValueType":
    if word not in ROLES:
        raise errors.invalid("role", f"{word!r} is none of {', '.join(ROLES)}")
    return ROLES[word]


def _one(found: list[str], what: str, text: str) -> str:
    if len(found) != 1:
        raise errors.NotFound(f"there is no {what} {text!r}", reason=f"{what.upper()}_NOT_FOUND")
    return found[0]
