"""Users, projects and keys over real gRPC: who may do what, until when, and what is written down."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from services.scheduler.tests.asking import refused
from sqlalchemy import select

from opentinker_kit.auth import digest_of
from opentinker_kit.clock import ManualClock
from opentinker_scheduler.adapters.sql.engines import open_engine
from opentinker_scheduler.adapters.sql.tables import metadata
from opentinkerapi.run.v1 import run_pb2, run_service_pb2
from opentinkerapi.run.v1.run_service_pb2_grpc import RunServiceStub
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import OpenTinkerError
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import account_pb2, job_pb2, server_registry_service_pb2
from opentinkerapi.scheduler.v1 import account_service_pb2 as pb
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as jobs_pb2
from opentinkerapi.scheduler.v1.account_service_pb2_grpc import AccountServiceStub
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from opentinkerapi.scheduler.v1.server_registry_service_pb2_grpc import ServerRegistryServiceStub

VIEWER, MEMBER, ADMIN = account_pb2.ROLE_VIEWER, account_pb2.ROLE_MEMBER, account_pb2.ROLE_ADMIN


@dataclass
class Person:
    """A user with a key for one project, and stubs that use it."""

    name: str
    project: str
    key: str
    api_key: str
    accounts: Any
    jobs: Any
    runs: Any


class People:
    """Makes projects and users as the bootstrap admin."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.root: Any = AccountServiceStub(rig.channel())

    async def project(self, name: str) -> str:
        request = pb.CreateProjectRequest(
            request_id=self.rig.request_id(), project=account_pb2.Project(display_name=name)
        )
        return str((await self.root.CreateProject(request)).project.name)

    async def user(self, name: str, project: str, role: int) -> str:
        request = pb.CreateUserRequest(
            request_id=self.rig.request_id(), user=account_pb2.User(display_name=name)
        )
        user = str((await self.root.CreateUser(request)).user.name)
        await self.set_role(project, user, role)
        return user

    async def set_role(self, project: str, user: str, role: int) -> None:
        request = pb.SetMemberRequest(
            request_id=self.rig.request_id(),
            project=project,
            user=user,
            role=role,  # type: ignore[arg-type]
        )
        await self.root.SetMember(request)

    async def person(self, name: str, project: str, role: int, **fields: Any) -> Person:
        user = await self.user(name, project, role)
        request = pb.CreateApiKeyRequest(
            request_id=self.rig.request_id(), project=project, user=user, **fields
        )
        answer = await self.root.CreateApiKey(request)
        return self.holder(user, project, answer)

    def holder(self, user: str, project: str, answer: pb.CreateApiKeyResponse) -> Person:
        channel = open_channel(self.rig.address, key=answer.key)
        self.rig.channels.append(channel)
        return Person(
            user,
            project,
            answer.key,
            answer.api_key.name,
            AccountServiceStub(channel),
            SchedulerServiceStub(channel),
            RunServiceStub(channel),
        )


@pytest.fixture
async def rig(start_rig: Any) -> Any:
    """A scheduler that starts nothing, on a clock that a test moves."""
    return await start_rig({"clock": ManualClock()}, launcher="static")


@pytest.fixture
def people(rig: Any) -> People:
    return People(rig)


def who(person: Person) -> Any:
    return person.accounts.GetCaller(pb.GetCallerRequest())


async def test_the_first_key_is_an_admins_of_the_first_project(people: People) -> None:
    me = await people.root.GetCaller(pb.GetCallerRequest())
    assert (me.caller, me.project, me.role) == ("bootstrap", "projects/default", ADMIN)
    assert me.cluster_admin
    (project,) = (await people.root.ListProjects(pb.ListProjectsRequest())).projects
    assert (project.name, project.display_name) == ("projects/default", "default")


def written(records: Any) -> bytes:
    """Everything that the database holds."""
    engine = open_engine(records.where)
    try:
        with engine.connect() as connection:
            rows = [connection.execute(select(table)).all() for table in metadata.sorted_tables]
    finally:
        engine.dispose()
    return repr(rows).encode()


async def test_a_key_says_who_and_where_and_is_shown_once(rig: Any, people: People, records: Any) -> None:
    project = await people.project("one")
    user = await people.user("ann", project, MEMBER)
    request = pb.CreateApiKeyRequest(request_id="once", project=project, user=user, display_name="laptop")
    first = await people.root.CreateApiKey(request)
    again = await people.root.CreateApiKey(request)
    assert first.key.startswith("otk_")
    assert (again.key, again.api_key) == ("", first.api_key)
    ann = people.holder(user, project, first)
    me = await who(ann)
    assert (me.caller, me.project, me.role, me.api_key) == (user, project, MEMBER, first.api_key.name)
    assert not me.cluster_admin
    listed = (await ann.accounts.ListApiKeys(pb.ListApiKeysRequest())).api_keys
    assert [key.display_name for key in listed] == ["laptop"]
    # Nothing but a hash is on disk, the kept answers included.
    stored = written(records)
    assert first.key.encode() not in stored
    assert digest_of(first.key).hex().encode() in stored


async def test_a_key_ends_with_everything_it_rests_on(rig: Any, people: People) -> None:
    project = await people.project("one")
    clock = rig.scheduler._clock

    async def ended(person: Person, says: str) -> None:
        error = await refused(who(person))
        assert error.reason == Reason.UNAUTHENTICATED
        assert says in error.message

    revoked = await people.person("revoked", project, MEMBER)
    disabled = await people.person("disabled", project, MEMBER)
    removed = await people.person("removed", project, MEMBER)
    demoted = await people.person("demoted", project, ADMIN)
    request = pb.CreateApiKeyRequest(request_id="ttl", project=project, user=demoted.name)
    request.ttl.FromTimedelta(timedelta(seconds=60))
    expiring = people.holder(demoted.name, project, await people.root.CreateApiKey(request))
    for person in (revoked, disabled, removed, demoted, expiring):
        await who(person)

    revoke = pb.RevokeApiKeyRequest(request_id="r", name=revoked.api_key)
    await people.root.RevokeApiKey(revoke)
    await people.root.RevokeApiKey(pb.RevokeApiKeyRequest(request_id="r2", name=revoked.api_key))
    await ended(revoked, "revoked")
    update = pb.UpdateUserRequest(request_id="d", name=disabled.name, disabled=True)
    await people.root.UpdateUser(update)
    await ended(disabled, "disabled")
    await people.root.UpdateUser(pb.UpdateUserRequest(request_id="e", name=disabled.name, disabled=False))
    await who(disabled)
    remove = pb.RemoveMemberRequest(request_id="m", project=project, user=removed.name)
    await people.root.RemoveMember(remove)
    await ended(removed, "no member")
    await people.set_role(project, demoted.name, VIEWER)
    assert (await who(demoted)).role == VIEWER
    await clock.advance(61.0)
    await ended(expiring, "expired")
    await who(demoted)


async def test_a_clock_that_jumps_back_revives_no_revoked_key(rig: Any, people: People) -> None:
    project = await people.project("one")
    ann = await people.person("ann", project, MEMBER)
    await people.root.RevokeApiKey(pb.RevokeApiKeyRequest(request_id="r", name=ann.api_key))
    rig.scheduler._clock._start -= timedelta(days=1)
    assert (await refused(who(ann))).reason == Reason.UNAUTHENTICATED


async def test_members_make_keys_for_themselves_and_no_stronger_ones(people: People) -> None:
    project = await people.project("one")
    ann = await people.person("ann", project, MEMBER)
    bob = await people.person("bob", project, ADMIN)
    own = await ann.accounts.CreateApiKey(pb.CreateApiKeyRequest(request_id="own", role=VIEWER))
    viewer = people.holder(ann.name, project, own)
    assert (await who(viewer)).role == VIEWER
    for request, reason in (
        (pb.CreateApiKeyRequest(request_id="1", role=ADMIN), Reason.INVALID_FIELD),
        (pb.CreateApiKeyRequest(request_id="2", user=bob.name), Reason.PERMISSION_DENIED),
        (pb.CreateApiKeyRequest(request_id="3", project="projects/default"), Reason.PROJECT_NOT_FOUND),
    ):
        assert (await refused(ann.accounts.CreateApiKey(request))).reason == reason
    error = await refused(viewer.accounts.CreateApiKey(pb.CreateApiKeyRequest(request_id="4")))
    assert error.reason == Reason.PERMISSION_DENIED
    # Whose key is not theirs, members do not see; admins decide about all of the project.
    revoke = pb.RevokeApiKeyRequest(request_id="5", name=bob.api_key)
    assert (await refused(ann.accounts.RevokeApiKey(revoke))).reason == Reason.API_KEY_NOT_FOUND
    listed = (await ann.accounts.ListApiKeys(pb.ListApiKeysRequest())).api_keys
    assert {key.user for key in listed} == {ann.name}
    await bob.accounts.RevokeApiKey(pb.RevokeApiKeyRequest(request_id="6", name=ann.api_key))
    assert (await refused(who(ann))).reason == Reason.UNAUTHENTICATED


async def test_a_projects_admin_is_nobody_elsewhere(people: People) -> None:
    one, two = await people.project("one"), await people.project("two")
    ann, bob = await people.person("ann", one, ADMIN), await people.person("bob", two, ADMIN)
    me = ann.accounts
    for call, reason in (
        (me.ListUsers(pb.ListUsersRequest()), Reason.PERMISSION_DENIED),
        (me.ListMembers(pb.ListMembersRequest(project=two)), Reason.PROJECT_NOT_FOUND),
        (me.ListApiKeys(pb.ListApiKeysRequest(project=two)), Reason.PROJECT_NOT_FOUND),
        (me.ListAuditEntries(pb.ListAuditEntriesRequest(project=two)), Reason.PROJECT_NOT_FOUND),
        (
            me.RevokeApiKey(pb.RevokeApiKeyRequest(request_id="r", name=bob.api_key)),
            Reason.API_KEY_NOT_FOUND,
        ),
        (
            me.SetMember(pb.SetMemberRequest(request_id="s", project=two, user=ann.name, role=ADMIN)),
            Reason.PROJECT_NOT_FOUND,
        ),
    ):
        assert (await refused(call)).reason == reason
    assert [project.name for project in (await me.ListProjects(pb.ListProjectsRequest())).projects] == [one]
    # In its own it decides, about users that it was told of.
    await me.SetMember(pb.SetMemberRequest(request_id="m", user=bob.name, role=VIEWER))
    members = (await me.ListMembers(pb.ListMembersRequest())).members
    assert {(member.user, member.role) for member in members} == {(ann.name, ADMIN), (bob.name, VIEWER)}


@pytest.mark.parametrize("name", ["", "   ", "two\nlines", "x" * 201])
async def test_names_that_nobody_can_read_are_refused(people: People, name: str) -> None:
    user = pb.CreateUserRequest(request_id="u", user=account_pb2.User(display_name=name))
    error = await refused(people.root.CreateUser(user))
    assert error.reason == (Reason.INVALID_FIELD if name else Reason.REQUIRED_FIELD)
    assert error.violations[0][0] == "user.display_name"


async def test_bad_requests_name_the_field(people: People) -> None:
    project = await people.project("one")
    user = await people.user("ann", project, VIEWER)
    taken = pb.CreateProjectRequest(request_id="t", project=account_pb2.Project(display_name=" one "))
    assert (await refused(people.root.CreateProject(taken))).reason == Reason.ALREADY_REGISTERED

    async def key(**fields: Any) -> OpenTinkerError:
        seconds = fields.pop("seconds", None)
        request = pb.CreateApiKeyRequest(request_id="k", **{"project": project, "user": user, **fields})
        if seconds is not None:
            request.ttl.FromTimedelta(timedelta(seconds=seconds))
        return await refused(people.root.CreateApiKey(request))

    for seconds in (0, -5, 4e8):
        error = await key(seconds=seconds)
        assert (error.reason, error.violations[0][0]) == (Reason.INVALID_FIELD, "ttl")
    assert (await key(role=MEMBER)).violations[0][0] == "role"
    assert (await key(role=17)).violations[0][0] == "role"
    assert (await key(user="users/none")).reason == Reason.USER_NOT_FOUND
    assert (await key(user="nobody")).reason == Reason.USER_NOT_FOUND
    assert (await key(user="")).violations[0][0] == "user"
    assert (await key(project="projects/none")).reason == Reason.PROJECT_NOT_FOUND
    assert (await key(display_name="x" * 201)).violations[0][0] == "display_name"
    resolve = pb.ResolveApiKeyRequest(sha256=b"short")
    service = AccountServiceStub(people.rig.channel("service"))
    assert (await refused(service.ResolveApiKey(resolve))).violations[0][0] == "sha256"


def job() -> job_pb2.Job:
    slot = job_pb2.SlotSpec(role=job_pb2.SLOT_ROLE_TRAINER, base_model="some-model")
    slot.options.engine = "noop"
    return job_pb2.Job(kind=job_pb2.JOB_KIND_LORA_RL, slots=[slot])


async def test_tenants_have_the_same_request_ids_and_nothing_else_in_common(
    start_rig: Any,
) -> None:
    rig = await start_rig(behavior="silent")
    people = People(rig)
    made = []
    for name in ("one", "two"):
        person = await people.person(name, await people.project(name), MEMBER)
        answer = await person.jobs.CreateJob(jobs_pb2.CreateJobRequest(request_id="same", job=job()))
        run = await person.runs.CreateRun(
            run_service_pb2.CreateRunRequest(request_id="same", run=run_pb2.Run(job=answer.job.name))
        )
        assert f"projects/{answer.job.project}" == person.project
        made.append((person, answer.job.name, run.run.name))
    (one, job_of_one, run_of_one), (two, job_of_two, run_of_two) = made
    assert job_of_one != job_of_two
    for person, own_job, own_run, others_run in (
        (one, job_of_one, run_of_one, run_of_two),
        (two, job_of_two, run_of_two, run_of_one),
    ):
        found = (await person.jobs.ListJobs(jobs_pb2.ListJobsRequest())).jobs
        assert [each.name for each in found] == [own_job]
        runs = (await person.runs.ListRuns(run_service_pb2.ListRunsRequest())).runs
        assert [each.name for each in runs] == [own_run]
        error = await refused(person.runs.GetRun(run_service_pb2.GetRunRequest(name=others_run)))
        assert error.reason == Reason.RUN_NOT_FOUND
    # Nor in what the first project sees: it runs the cluster and owns no more than others.
    assert not (await rig.jobs.ListJobs(jobs_pb2.ListJobsRequest())).jobs


async def test_b97_a_tenant_cannot_register_servers(rig: Any, people: People) -> None:
    ann = await people.person("ann", "projects/default", ADMIN)
    async with open_channel(rig.address, key=ann.key) as channel:
        request = server_registry_service_pb2.RegisterServerRequest(
            instance_id="i",
            role=job_pb2.SLOT_ROLE_TRAINER,
            base_model="m",
            slots=1,
            advertise_address="10.0.0.1:1",
        )
        error = await refused(ServerRegistryServiceStub(channel).RegisterServer(request))
    assert error.reason == Reason.PERMISSION_DENIED
    assert await rig.servers() == []


async def test_who_looks_is_not_told_how_servers_are_reached_by_their_host(start_rig: Any) -> None:
    rig = await start_rig(behavior="silent")
    people = People(rig)
    ann = await people.person("ann", await people.project("one"), MEMBER)
    await ann.jobs.CreateJob(jobs_pb2.CreateJobRequest(request_id="j", job=job()))
    await rig.scheduler.reconciler.tick()
    (server,) = (await ann.jobs.ListServers(jobs_pb2.ListServersRequest())).servers
    (known,) = await rig.servers()
    assert (server.name, server.pid, server.log_path) == (known.name, 0, "")


async def test_the_audit_log_tells_who_changed_what_and_who_was_refused(rig: Any, people: People) -> None:
    project = await people.project("one")
    ann = await people.person("ann", project, ADMIN)
    member = await people.person("bob", project, MEMBER)
    run = await member.runs.CreateRun(
        run_service_pb2.CreateRunRequest(request_id="run", run=run_pb2.Run(display_name="mine"))
    )
    await refused(member.jobs.CancelJob(jobs_pb2.CancelJobRequest(name="jobs/none", request_id="c")))
    await refused(member.accounts.ListUsers(pb.ListUsersRequest()))
    await member.jobs.ListJobs(jobs_pb2.ListJobsRequest())
    async with open_channel(rig.address, key="otk_wrong") as channel:
        await refused(SchedulerServiceStub(channel).ListJobs(jobs_pb2.ListJobsRequest()))

    found = (await ann.accounts.ListAuditEntries(pb.ListAuditEntriesRequest())).entries
    told = [(e.caller, e.method.rpartition("/")[2], e.resource, e.outcome) for e in found]
    assert told == [
        (member.name, "ListUsers", "", "PERMISSION_DENIED"),
        (member.name, "CancelJob", "jobs/none", "JOB_NOT_FOUND"),
        (member.name, "CreateRun", run.run.name, "OK"),
    ]
    assert {entry.project for entry in found} == {project}
    assert all(entry.api_key == member.api_key and entry.peer for entry in found)
    everything = pb.ListAuditEntriesRequest()
    methods = [
        (entry.caller, entry.method.rpartition("/")[2], entry.outcome)
        for entry in (await people.root.ListAuditEntries(everything)).entries
    ]
    assert ("", "ListJobs", "UNAUTHENTICATED") in methods
    assert ("bootstrap", "CreateProject", "OK") in methods
    # By page, by caller, by method; and no longer than it is kept.
    page = pb.ListAuditEntriesRequest(page_size=2, caller=member.name)
    first = await people.root.ListAuditEntries(page)
    page.page_token = first.next_page_token
    second = await people.root.ListAuditEntries(page)
    assert [len(first.entries), len(second.entries), second.next_page_token] == [2, 1, ""]
    only = pb.ListAuditEntriesRequest(method=first.entries[0].method)
    assert {e.outcome for e in (await people.root.ListAuditEntries(only)).entries} == {"PERMISSION_DENIED"}
    # Not by waiting: loops that wake every few seconds would do so for 90 days.
    rig.scheduler._audit._keep = timedelta(seconds=1)
    await rig.scheduler._clock.advance(2.0)
    await rig.scheduler.database.run(rig.scheduler._audit.forget)
    assert not (await people.root.ListAuditEntries(everything)).entries


async def test_accounts_and_the_key_of_tokens_outlive_a_restart(start_rig: Any) -> None:
    rig = await start_rig(launcher="static")
    people = People(rig)
    ann = await people.person("ann", await people.project("one"), MEMBER)
    keys = (await people.root.ListTokenKeys(pb.ListTokenKeysRequest())).keys
    assert [len(key.public_key) for key in keys] == [32]
    await rig.stop()
    again = await start_rig(launcher="static")
    async with open_channel(again.address, key=ann.key) as channel:
        stub = AccountServiceStub(channel)
        assert (await stub.GetCaller(pb.GetCallerRequest())).caller == ann.name
        assert (await stub.ListTokenKeys(pb.ListTokenKeysRequest())).keys == keys
