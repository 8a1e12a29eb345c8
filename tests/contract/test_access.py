"""Every RPC of every service, asked by everybody: no key, keys that work no more, each role, another tenant,
and tokens of other jobs. The rows are written by hand; an RPC without one fails.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor

from opentinkerapi.runtime.retries import all_services
from tests.contract import access_job_rows, access_rows
from tests.contract.access_rows import ADMIN, CLUSTER, JOB, MEMBER, SERVICE, VIEWER
from tests.contract.access_world import World, open_world

ROWS = {**access_rows.ROWS, **access_job_rows.ROWS}
METHODS: dict[str, MethodDescriptor] = {
    f"{service.name}.{method.name}": method for service in all_services() for method in service.methods
}
KNOWS_ATTEMPTS = (
    *(f"TrainerService.{method}" for method in ("CreatePolicy", "GetPolicy", "OptimStep", "GetOperation")),
    *(f"InferenceService.{method}" for method in ("Sample", "StreamSample", "ScoreTokens")),
    "InferenceService.LoadPolicyVersion",
)
"""RPCs that look at when a token was made; a check for each of the ways in which they do."""
REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED")
ROLES = (VIEWER, MEMBER, ADMIN)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> AsyncIterator[World]:
    async with open_world(tmp_path_factory.mktemp("access"), tiny_model_dir) as made:
        yield made


async def test_every_rpc_has_a_row() -> None:
    assert set(ROWS) == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("key", ["", "unknown", "expired", "revoked"])
async def test_nobody(world: World, name: str, key: str) -> None:
    reason, _ = await world.ask(METHODS[name], [ROWS[name].ask(world)], world.keys.get(key, ""))
    assert reason == "UNAUTHENTICATED"


@pytest.mark.parametrize("name", METHODS)
async def test_roles(world: World, name: str) -> None:
    row, method = ROWS[name], METHODS[name]
    for role in ROLES:
        found = world.nowhere() if row.changes else world
        reason, _ = await world.ask(method, [row.ask(found)], world.keys[role])
        if row.who == JOB:
            # A key says who somebody is, and not for which job.
            assert reason == ("PERMISSION_DENIED" if role == VIEWER else "UNAUTHENTICATED"), role
        elif row.who in ROLES and ROLES.index(role) >= ROLES.index(row.who):
            assert reason not in REFUSALS, role
            assert row.changes or reason == "OK" or name in MAY_FAIL, (role, reason)
        else:
            assert reason == "PERMISSION_DENIED", role
    key = world.keys["service" if row.who == SERVICE else "bootstrap"]
    if row.who in (CLUSTER, SERVICE):
        reason, _ = await world.ask(method, [row.ask(world.nowhere())], key)
        assert reason not in REFUSALS or name in MAY_REFUSE


@pytest.mark.parametrize("name", METHODS)
async def test_another_tenant(world: World, name: str) -> None:
    row, method = ROWS[name], METHODS[name]
    token = world.tokens["other"] if row.who == JOB else ""
    key = "" if row.who == JOB else world.keys["other"]
    reason, answer = await world.ask(method, [row.ask(world)], key, token)
    if row.who == SERVICE:
        assert reason == "PERMISSION_DENIED"
    else:
        assert reason == (row.told or "OK")
    leaked = [secret for secret in world.secrets_of_a if secret in answer]
    assert not leaked
    # Whether somebody else has the same bytes is told to nobody.
    assert "exists" not in answer


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.who == JOB])
async def test_job_tokens(world: World, name: str) -> None:
    row, method = ROWS[name], METHODS[name]

    async def ask(token: str, key: str = "") -> str:
        return (await world.ask(method, [row.ask(world)], key, world.tokens[token]))[0]

    assert await ask("sibling") == (row.sibling or row.told or "OK")
    assert await ask("forged") == "UNAUTHENTICATED"
    assert await ask("expired") == "STALE_ATTEMPT"
    assert await ask("forged", world.keys["admin"]) == "UNAUTHENTICATED"
    if not name.startswith("InferenceService"):
        assert await ask("sampling") == "UNAUTHENTICATED"
    if name in KNOWS_ATTEMPTS:
        assert await ask("stale") == "STALE_ATTEMPT"
    # The token of the row's own job, in the metadata and, where the request has one, in its field.
    if not row.changes:
        assert await ask("own") == "OK"
        request = row.ask(world)
        place = getattr(request, "sample", request)
        if "job_token" in place.DESCRIPTOR.fields_by_name:
            place.job_token = world.tokens["own"]
            assert (await world.ask(method, [request], world.keys["member"]))[0] == "OK"
            place.job_token = world.tokens["sibling"]
            assert (await world.ask(method, [request], world.keys["member"]))[0] == (
                row.sibling or row.told or "OK"
            )


async def test_drive_hides_the_episodes_of_others(world: World) -> None:
    name = "EnvHostService.Drive"
    for token, told in {"own": "begin {", "other": "error {", "sibling": "error {"}.items():
        reason, answer = await world.ask(METHODS[name], [ROWS[name].ask(world)], "", world.tokens[token])
        assert reason == "OK"
        assert told in answer, token
        assert ("code: 5" in answer) == (told == "error {")


async def test_a_stream_goes_no_further_than_its_token(world: World) -> None:
    """Each message of a stream may bring another token; what it may not bring is one that is not valid."""
    name = "EnvHostService.Drive"
    for token, told in {"expired": "STALE_ATTEMPT", "forged": "UNAUTHENTICATED", "own": "OK"}.items():
        own, later = ROWS[name].ask(world), ROWS[name].ask(world)
        later.job_token = world.tokens[token]  # type: ignore[attr-defined]
        reasons = await world.ask_all(METHODS[name], [own, later], "", world.tokens["own"])
        assert reasons == told, token


async def test_nothing_of_a_was_changed(world: World) -> None:
    """After all that everybody tried: A's things are there, and the audit log tells who was refused."""
    for name in ("SchedulerService.GetJob", "CatalogService.GetCheckpoint", "RunService.GetRun"):
        reason, _ = await world.ask(METHODS[name], [ROWS[name].ask(world)], world.keys["viewer"])
        assert reason == "OK", name
    own = ROWS["EnvHostService.RenewLease"]
    method = METHODS["EnvHostService.RenewLease"]
    _, answer = await world.ask(method, [own.ask(world)], "", world.tokens["own"])
    assert world.episode not in answer
    entries = "AccountService.ListAuditEntries"
    _, answer = await world.ask(METHODS[entries], [ROWS[entries].ask(world)], world.keys["admin"])
    assert "PERMISSION_DENIED" in answer


MAY_FAIL = (
    # A viewer of the trainer's tokenizer: the engine that computes nothing has none to give.
    "TrainerService.GetTokenizer",
    "InferenceService.RenderChat",
    "CatalogService.ExportWeights",
    "EnvHostService.ListTasks",
)
"""Allowed, and still refused for other reasons in a cluster without engines."""
MAY_REFUSE = ("AccountService.ResolveApiKey",)
"""Its answer is that the key is nobody's."""
