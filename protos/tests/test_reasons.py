"""The catalogue of reasons, the enum on the wire and the client's table agree."""

import grpc
import pytest

from opentinkerapi.errors.v1 import errors_pb2
from opentinkerapi.runtime import errors
from opentinkerapi.runtime.reasons import CATALOGUE, Reason
from opentinkerapi.runtime.status import StatusData, decode, encode, from_trailers

PREFIX = "ERROR_REASON_"


def test_the_enum_on_the_wire_is_mirrored() -> None:
    names = [name.removeprefix(PREFIX) for name in errors_pb2.ErrorReason.keys()]  # noqa: SIM118 (no dict)
    assert [reason.value for reason in Reason] == [name for name in names if name != "UNSPECIFIED"]
    assert all(reason.name == reason.value for reason in Reason)


def test_every_reason_has_a_status_and_a_text() -> None:
    assert set(CATALOGUE) == set(Reason)
    assert all(entry.message and entry.code is not grpc.StatusCode.OK for entry in CATALOGUE.values())


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_is_in_the_clients_table(reason: Reason) -> None:
    code = CATALOGUE[reason].code
    kind = errors.CLASSES[code, reason]
    assert kind.code is code
    error = errors.from_status_data(StatusData(code, "text", reason))
    assert type(error) is kind
    assert error.reason is reason


@pytest.mark.parametrize(
    ("kind", "kin"),
    [
        (errors.InvalidArgument, ValueError),
        (errors.NotFound, LookupError),
        (errors.PermissionDenied, PermissionError),
        (errors.Unauthenticated, PermissionError),
        (errors.Unavailable, ConnectionError),
        (errors.DeadlineExceeded, TimeoutError),
        (errors.Unimplemented, NotImplementedError),
        (errors.StaleAttempt, RuntimeError),
        (errors.StepTimeout, TimeoutError),
    ],
)
def test_each_class_is_its_stdlib_kin(kind: type[errors.OpenTinkerError], kin: type[Exception]) -> None:
    error = kind("what happened", field="slots[0].role", retry_after_s=2.0)
    assert isinstance(error, kin)
    assert str(error) == "what happened"
    assert (error.field, error.retry_after_s) == ("slots[0].role", 2.0)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_has_a_class_even_with_a_reason_from_the_future(code: grpc.StatusCode) -> None:
    error = errors.from_status_data(StatusData(code, "text", "NOT_INVENTED_YET"))
    assert error.code is code
    assert error.reason == "NOT_INVENTED_YET"


def test_details_survive_the_trip() -> None:
    data = StatusData(
        grpc.StatusCode.INVALID_ARGUMENT,
        "two fields are wrong",
        Reason.INVALID_FIELD,
        metadata={"limit": "3"},
        violations=(("a", "too long"), ("b[0].c", "unknown")),
        retry_after_s=0.25,
        quota=(("projects/p", "3 slots"),),
    )
    assert decode(encode(data)) == data
    error = errors.from_status_data(data)
    assert error.field == "a"
    assert str(error) == "two fields are wrong; a: too long; b[0].c: unknown"


def test_broken_details_are_no_details() -> None:
    assert from_trailers([("grpc-status-details-bin", b"\xff\xff")]) is None
    assert from_trailers([("other", "x")]) is None
    assert from_trailers(None) is None
