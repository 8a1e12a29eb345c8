"""What a key may do, as a rule; and what is kept in memory of keys and of calls."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_kit.auth import Access, Kind, Principal, Role, digest_of
from opentinker_kit.clock import ManualClock
from opentinker_kit.errors import ServiceError
from opentinker_kit.interceptors import EndedCall
from opentinker_scheduler.access import SERVICES, access_table, is_audited
from opentinker_scheduler.application import audit as audit_module
from opentinker_scheduler.application.accounts import KeyRing
from opentinker_scheduler.application.audit import AuditLog
from opentinker_scheduler.domain.accounts import ApiKey, AuditEntry, Member, User, effective_role
from opentinkerapi.runtime.reasons import Reason

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = ApiKey("k", digest_of("key").hex(), "p", "u", Role.ADMIN, "", NOW)
USER = User("u", "ann", False, NOW)
MEMBER = Member("p", "u", Role.ADMIN)

roles = st.sampled_from(list(Role))
times = st.none() | st.integers(-100, 100).map(lambda seconds: NOW + timedelta(seconds=seconds))


@given(roles, roles, times, times, st.booleans(), st.booleans())
def test_a_key_does_what_both_it_and_its_user_may_and_only_while_both_are_good(
    own: Role,
    users: Role,
    expires: datetime | None,
    revoked: datetime | None,
    disabled: bool,
    member: bool,
) -> None:
    key = replace(KEY, role=own, expire_time=expires, revoke_time=revoked)
    user = replace(USER, disabled=disabled)
    membership = replace(MEMBER, role=users) if member else None
    good = revoked is None and (expires is None or expires > NOW) and not disabled and member
    if good:
        assert effective_role(key, user, membership, NOW).rank == min(own.rank, users.rank)
        return
    with pytest.raises(ServiceError) as refused:
        effective_role(key, user, membership, NOW)
    assert refused.value.reason is Reason.UNAUTHENTICATED


@given(roles, st.booleans(), st.booleans())
def test_who_runs_the_cluster(role: Role, first_project: bool, by_token: bool) -> None:
    project, job = "default" if first_project else "p1", "jobs/j" if by_token else ""
    who = Principal(Kind.CALLER, project=project, role=role, job=job)
    assert who.is_cluster_admin == (role is Role.ADMIN and first_project and not by_token)
    assert not who.may(Access.SERVICE)
    assert who.scope == project


def test_every_method_is_in_the_table() -> None:
    methods = {f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods}
    assert set(access_table()) == methods


def call(method: str, who: Principal | None, outcome: str = "OK") -> EndedCall:
    return EndedCall(f"/some.Service/{method}", who, None, None, outcome, "ipv4:127.0.0.1:1")


@pytest.mark.parametrize(
    ("method", "kind", "outcome", "kept"),
    [
        ("CreateJob", Kind.CALLER, "OK", True),
        ("CancelJob", Kind.CALLER, "JOB_NOT_FOUND", True),
        ("GetJob", Kind.CALLER, "OK", False),
        ("GetJob", Kind.CALLER, "JOB_NOT_FOUND", False),
        ("ListUsers", Kind.CALLER, "OK", False),
        ("ListUsers", Kind.CALLER, "PERMISSION_DENIED", True),
        ("RenewJobLease", Kind.CALLER, "OK", False),
        ("RegisterServer", Kind.SERVICE, "OK", True),
        ("RegisterVersion", Kind.SERVICE, "OK", False),
        ("Anything", None, "UNAUTHENTICATED", True),
        ("Check", Kind.ANONYMOUS, "OK", False),
    ],
)
def test_what_the_audit_log_keeps(method: str, kind: Kind | None, outcome: str, kept: bool) -> None:
    assert is_audited(call(method, None if kind is None else Principal(kind), outcome)) is kept


class Accounts:
    """A store with one key."""

    def __init__(self) -> None:
        self.key: ApiKey | None = KEY
        self.reads = 0

    def find_key_by_hash(self, sha256: str) -> ApiKey | None:
        self.reads += 1
        return self.key if self.key is not None and self.key.sha256 == sha256 else None

    def find_user(self, user_id: str) -> User:
        return USER

    def find_member(self, project: str, user_id: str) -> Member:
        return MEMBER


class Audit:
    def __init__(self) -> None:
        self.written: list[AuditEntry] = []

    def add(self, entries: list[AuditEntry]) -> None:
        self.written.extend(entries)


class Store:
    """A database whose transactions take until `gate` is open, or fail."""

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.audit = Audit()
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = False

    async def run(self, work: Callable[[Any], Any]) -> Any:
        if self.fails:
            raise ServiceError(Reason.STORAGE_UNAVAILABLE)
        result = work(self)
        await self.gate.wait()
        return result


async def test_keys_are_read_once_until_something_changes() -> None:
    store = Store()
    keys = KeyRing(store, ManualClock(NOW))
    for _ in range(3):
        found = await keys.find(digest_of("key"))
        assert found is not None
        assert (found.project, found.user, found.api_key, found.role) == ("p", "u", "k", Role.ADMIN)
        assert await keys.find(digest_of("other")) is None
    assert store.accounts.reads == 2
    store.accounts.key = None
    keys.forget()
    assert await keys.find(digest_of("key")) is None


async def test_what_was_read_before_a_change_is_not_kept() -> None:
    store = Store()
    keys = KeyRing(store, ManualClock(NOW))
    store.gate.clear()
    reading = asyncio.create_task(keys.find(digest_of("key")))
    await asyncio.sleep(0)
    store.accounts.key = replace(KEY, revoke_time=NOW)
    keys.forget()
    store.gate.set()
    await reading
    with pytest.raises(ServiceError, match="revoked"):
        await keys.find(digest_of("key"))


async def test_a_flood_of_calls_does_not_fill_memory_and_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "MAX_WAITING", 10)
    store = Store()
    log = AuditLog(store, ManualClock(NOW), keep=timedelta(days=1), most=100)
    for number in range(25):
        log.add(None, f"/Service/Method{number}", "x" * 1000, "UNAUTHENTICATED", "peer")
    await log.flush()
    await log.flush()
    assert [entry.outcome for entry in store.audit.written] == ["UNAUTHENTICATED"] * 10 + ["DROPPED_15"]
    assert max(len(entry.resource) for entry in store.audit.written) == 255


async def test_entries_wait_while_they_cannot_be_written() -> None:
    store = Store()
    log = AuditLog(store, ManualClock(NOW), keep=timedelta(days=1), most=100)
    store.fails = True
    for number in range(3):
        log.add(Principal(Kind.CALLER, user="u", api_key="k"), f"/S/M{number}", "", "OK", "peer")
    with pytest.raises(ServiceError):
        await log.flush()
    store.fails = False
    # Two who write at once write each entry once.
    await asyncio.gather(log.flush(), log.flush())
    assert [entry.method for entry in store.audit.written] == ["/S/M0", "/S/M1", "/S/M2"]
    assert {(entry.caller, entry.api_key) for entry in store.audit.written} == {("users/u", "apiKeys/k")}
