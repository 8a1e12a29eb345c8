"""What gRPC itself reports becomes a typed error."""

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from opentinkerapi.runtime.errors import InternalError, Unavailable, from_rpc_error
from opentinkerapi.runtime.reasons import Reason


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed"),
        # grpc.aio, for a call that had no status when its connection ended.
        (grpc.StatusCode.INTERNAL, "Internal error from Core"),
    ],
)
def test_a_lost_connection(code: grpc.StatusCode, details: str) -> None:
    error = from_rpc_error(AioRpcError(code, Metadata(), Metadata(), details=details))
    assert isinstance(error, Unavailable)
    assert error.reason == Reason.CONNECTION_LOST


def test_another_internal_error_is_one() -> None:
    error = from_rpc_error(AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata(), details="a bug"))
    assert isinstance(error, InternalError)
