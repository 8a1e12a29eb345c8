"""Each RPC says which errors it returns and whether it may be retried; each reason says its status.

The convention, in the comment of an RPC: a line `Errors: REASON, REASON.` and a line `Retry: ...` that begins
with `safe`, `not safe` or `open a new`. Errors that any call can return (UNAUTHENTICATED, REQUIRED_FIELD,
INTERNAL and the like) need not be listed.
"""

import json

import pytest

from opentinkerapi.runtime.errors import CLASSES, OpenTinkerError
from opentinkerapi.runtime.reasons import CATALOGUE, Reason
from opentinkerapi.runtime.retries import service_config
from tests.contract import protofiles
from tests.contract.protofiles import Method

METHODS = protofiles.methods()
REASONS = protofiles.reasons()


def short_name(method: Method) -> str:
    return method.name.removeprefix("opentinkerapi.")


@pytest.mark.parametrize("method", METHODS, ids=short_name)
def test_each_rpc_documents_its_errors(method: Method) -> None:
    assert method.errors, f"{method.name}: no line 'Errors: REASON, REASON.' in its comment"
    unknown = [reason for reason in method.errors if reason not in REASONS]
    assert not unknown, f"{method.name} documents reasons that ErrorReason lacks: {unknown}"


@pytest.mark.parametrize("method", METHODS, ids=short_name)
def test_each_rpc_says_whether_it_may_be_retried(method: Method) -> None:
    retry = method.documented("Retry") or ""
    assert retry.startswith(("safe", "not safe", "open a new")), (
        f"{method.name}: no clear retry rule: {retry!r}"
    )


def test_what_grpc_retries_by_itself_is_documented_as_safe() -> None:
    safe = {method.name for method in METHODS if (method.documented("Retry") or "").startswith("safe")}
    retried = {
        f"{name['service']}.{name['method']}"
        for entry in json.loads(service_config())["methodConfig"]
        for name in entry["name"]
    }
    ours = {name for name in retried if name.startswith("opentinkerapi.")}
    assert ours, "the service config names none of our methods"
    assert ours <= safe


def test_the_runtime_knows_each_reason_and_no_other() -> None:
    assert {reason.value for reason in Reason} == set(REASONS)
    assert set(CATALOGUE) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_has_one_status_and_one_exception(reason: Reason) -> None:
    code = CATALOGUE[reason].code
    said = REASONS[reason.value].rstrip(".").split()[-1]
    assert said == code.name, f"{reason} is {code.name} in the catalogue, its proto comment ends with {said}"
    kind = CLASSES[code, reason]
    assert issubclass(kind, OpenTinkerError)
    assert kind is not OpenTinkerError
    assert kind.code == code


def test_each_reason_has_a_place_where_it_comes_from() -> None:
    documented = {reason for method in METHODS for reason in method.errors}
    in_a_resource = {  # in the `error` of a job or an operation, or in a server's log
        "IDLE_LIMIT",
        "LAUNCH_FAILED",
        "POISONED",
        "REPLAY_DIVERGED",
        "TIME_LIMIT",
    }
    for_later_rpcs = {"GROUP_NOT_FOUND"}
    from_any_call = {
        "CANCELLED",
        "CONNECTION_LOST",
        "DEADLINE_EXCEEDED",
        "DRAINING",
        "INTERNAL",
        "MESSAGE_TOO_LARGE",
        "OVERLOADED",
        "PERMISSION_DENIED",
        "REQUIRED_FIELD",
        "SERVER_STARTING",
        "STORAGE_FULL",
        "STORAGE_UNAVAILABLE",
        "TLS_FAILED",
        "UNAUTHENTICATED",
        "UNIMPLEMENTED",
    }
    assert set(REASONS) - documented - from_any_call == in_a_resource | for_later_rpcs
