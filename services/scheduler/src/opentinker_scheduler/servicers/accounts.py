"""AccountService: users, projects, members, keys, the audit log."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from opentinker_kit.auth import current_principal
from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application.accounts import Accounts, KeyRing
from opentinker_scheduler.application.answers import Answers
from opentinker_scheduler.application.audit import AuditLog
from opentinker_scheduler.application.pages import make_token, page_size, read_int, read_text
from opentinker_scheduler.application.tokens import JobTokens
from opentinker_scheduler.application.usage import Usage
from opentinker_scheduler.domain.prices import Prices
from opentinker_scheduler.ports import Database, Transaction
from opentinker_scheduler.wire import accounts as wire
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import account_service_pb2 as pb
from opentinkerapi.scheduler.v1.account_service_pb2_grpc import AccountServiceServicer

M = TypeVar("M", bound=Message)


class AccountServicer(AccountServiceServicer):
    """For admins, and for members about themselves."""

    def __init__(
        self,
        database: Database,
        answers: Answers,
        accounts: Accounts,
        keys: KeyRing,
        tokens: JobTokens,
        audit: AuditLog,
        usage: Usage,
        prices: Prices,
    ) -> None:
        self._database = database
        self._answers = answers
        self._accounts = accounts
        self._keys = keys
        self._tokens = tokens
        self._audit = audit
        self._usage = usage
        self._prices = prices

    async def GetCaller(self, request: pb.GetCallerRequest, context: Any) -> pb.GetCallerResponse:
        return wire.write_caller(current_principal())

    async def CreateUser(self, request: pb.CreateUserRequest, context: Any) -> pb.CreateUserResponse:
        who = current_principal()

        def create(tx: Transaction) -> pb.CreateUserResponse:
            user = self._accounts.create_user(tx, who, request.user.display_name)
            return pb.CreateUserResponse(user=wire.write_user(user))

        return await self._change(request, pb.CreateUserResponse, create)

    async def ListUsers(self, request: pb.ListUsersRequest, context: Any) -> pb.ListUsersResponse:
        who, size = current_principal(), page_size(request.page_size)
        after = read_int("ListUsers", "", request.page_token)
        found = await self._database.run(lambda tx: self._accounts.users(tx, who, after, size + 1))
        token = make_token("ListUsers", "", found[size - 1].seq) if len(found) > size else ""
        return pb.ListUsersResponse(users=map(wire.write_user, found[:size]), next_page_token=token)

    async def UpdateUser(self, request: pb.UpdateUserRequest, context: Any) -> pb.UpdateUserResponse:
        who = current_principal()

        def update(tx: Transaction) -> pb.UpdateUserResponse:
            user = self._accounts.disable_user(tx, who, request.name, disabled=request.disabled)
            return pb.UpdateUserResponse(user=wire.write_user(user))

        return await self._change(request, pb.UpdateUserResponse, update)

    async def CreateProject(self, request: pb.CreateProjectRequest, context: Any) -> pb.CreateProjectResponse:
        who = current_principal()

        def create(tx: Transaction) -> pb.CreateProjectResponse:
            project = self._accounts.create_project(tx, who, request.project.display_name)
            return pb.CreateProjectResponse(project=wire.write_project(project))

        return await self._change(request, pb.CreateProjectResponse, create)

    async def ListProjects(self, request: pb.ListProjectsRequest, context: Any) -> pb.ListProjectsResponse:
        who, size = current_principal(), page_size(request.page_size)
        after = read_int("ListProjects", "", request.page_token)
        found = await self._database.run(lambda tx: self._accounts.projects(tx, who, after, size + 1))
        token = make_token("ListProjects", "", found[size - 1].seq) if len(found) > size else ""
        return pb.ListProjectsResponse(projects=map(wire.write_project, found[:size]), next_page_token=token)

    async def SetMember(self, request: pb.SetMemberRequest, context: Any) -> pb.SetMemberResponse:
        who, role = current_principal(), wire.read_role(request.role, "role")

        def put(tx: Transaction) -> pb.SetMemberResponse:
            member = self._accounts.set_member(tx, who, request.project, request.user, role)
            return pb.SetMemberResponse(member=wire.write_member(member))

        return await self._change(request, pb.SetMemberResponse, put)

    async def RemoveMember(self, request: pb.RemoveMemberRequest, context: Any) -> pb.RemoveMemberResponse:
        who = current_principal()

        def remove(tx: Transaction) -> pb.RemoveMemberResponse:
            self._accounts.remove_member(tx, who, request.project, request.user)
            return pb.RemoveMemberResponse()

        return await self._change(request, pb.RemoveMemberResponse, remove)

    async def ListMembers(self, request: pb.ListMembersRequest, context: Any) -> pb.ListMembersResponse:
        who, size, project = current_principal(), page_size(request.page_size), request.project
        after = read_text("ListMembers", project, request.page_token)
        found = await self._database.run(lambda tx: self._accounts.members(tx, who, project, after, size + 1))
        token = make_token("ListMembers", project, found[size - 1].user_id) if len(found) > size else ""
        return pb.ListMembersResponse(members=map(wire.write_member, found[:size]), next_page_token=token)

    async def CreateApiKey(self, request: pb.CreateApiKeyRequest, context: Any) -> pb.CreateApiKeyResponse:
        who, asked = current_principal(), wire.read_new_key(request)
        made: list[str] = []

        def create(tx: Transaction) -> pb.CreateApiKeyResponse:
            key, secret = self._accounts.create_key(tx, who, asked)
            made.append(secret)
            return pb.CreateApiKeyResponse(api_key=wire.write_key(key))

        response = await self._change(request, pb.CreateApiKeyResponse, create)
        # The answer that is kept for repetitions is without it: nobody can be told a key twice.
        response.key = made[-1] if made else ""
        return response

    async def ListApiKeys(self, request: pb.ListApiKeysRequest, context: Any) -> pb.ListApiKeysResponse:
        who, size, project = current_principal(), page_size(request.page_size), request.project
        before = read_int("ListApiKeys", project, request.page_token)
        found = await self._database.run(lambda tx: self._accounts.keys(tx, who, project, before, size + 1))
        token = make_token("ListApiKeys", project, found[size - 1].seq) if len(found) > size else ""
        return pb.ListApiKeysResponse(api_keys=map(wire.write_key, found[:size]), next_page_token=token)

    async def RevokeApiKey(self, request: pb.RevokeApiKeyRequest, context: Any) -> pb.RevokeApiKeyResponse:
        who = current_principal()

        def revoke(tx: Transaction) -> pb.RevokeApiKeyResponse:
            key = self._accounts.revoke_key(tx, who, request.name)
            return pb.RevokeApiKeyResponse(api_key=wire.write_key(key))

        return await self._change(request, pb.RevokeApiKeyResponse, revoke)

    async def ListAuditEntries(
        self, request: pb.ListAuditEntriesRequest, context: Any
    ) -> pb.ListAuditEntriesResponse:
        who, size = current_principal(), page_size(request.page_size)
        await self._audit.flush()

        def read(tx: Transaction) -> pb.ListAuditEntriesResponse:
            everything = who.is_cluster_admin and not request.project
            project = None if everything else self._accounts.project_id(tx, who, request.project)
            asked = wire.read_filter(request, project)
            scope = wire.filter_text(asked)
            before = read_int("ListAuditEntries", scope, request.page_token)
            found = self._audit.page(tx, asked, before, size + 1)
            token = make_token("ListAuditEntries", scope, found[size - 1].seq) if len(found) > size else ""
            entries = map(wire.write_entry, found[:size])
            return pb.ListAuditEntriesResponse(entries=entries, next_page_token=token)

        return await self._database.run(read)

    async def ListUsage(self, request: pb.ListUsageRequest, context: Any) -> pb.ListUsageResponse:
        who, size = current_principal(), page_size(request.page_size)
        by_job, write = wire.is_by_job(request.group), partial(wire.write_usage, prices=self._prices)
        # What servers said a moment ago, too.
        await self._usage.take_in()

        def read(tx: Transaction) -> pb.ListUsageResponse:
            project = self._accounts.project_id(tx, who, request.project)
            scope = f"{project}/{request.group}"
            if by_job:
                last = read_int("ListUsage", scope, request.page_token)
                jobs = self._usage.jobs(tx, project, last, size + 1)
                token = make_token("ListUsage", scope, jobs[size - 1][0]) if len(jobs) > size else ""
                rows = [write(project, used, job=job) for _, job, used in jobs[:size]]
            else:
                before = read_text("ListUsage", scope, request.page_token)
                days = self._usage.days(tx, project, before, size + 1)
                token = make_token("ListUsage", scope, days[size - 1][0]) if len(days) > size else ""
                rows = [write(project, used, day=day) for day, used in days[:size]]
            return pb.ListUsageResponse(usage=rows, next_page_token=token)

        return await self._database.run(read)

    async def ListTokenKeys(self, request: pb.ListTokenKeysRequest, context: Any) -> pb.ListTokenKeysResponse:
        keys = [pb.TokenKey(id=name, public_key=key) for name, key in self._tokens.public_keys.items()]
        return pb.ListTokenKeysResponse(keys=keys)

    async def ResolveApiKey(self, request: pb.ResolveApiKeyRequest, context: Any) -> pb.ResolveApiKeyResponse:
        found = await self._keys.find(wire.check_sha256(request.sha256))
        if found is None:
            text = "the API key is wrong; check which cluster it belongs to"
            raise ServiceError(Reason.UNAUTHENTICATED, text)
        return pb.ResolveApiKeyResponse(caller=wire.write_caller(found))

    async def _change(self, request: Message, response_type: type[M], work: Callable[[Transaction], M]) -> M:
        try:
            return await self._answers.once(request, response_type, work)
        finally:
            self._keys.forget()
