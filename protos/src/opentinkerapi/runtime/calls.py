"""How a call failed, as one kind of exception."""

import asyncio
import contextlib
from collections.abc import Iterator

import grpc

from opentinkerapi.runtime.errors import Unavailable, from_rpc_error
from opentinkerapi.runtime.reasons import Reason


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Turn a failed RPC into the exception of its status and reason.

    grpc.aio may call a call cancelled whose connection went away as it began, though nobody cancelled
    anything. Let through, that would end the task which made it without a word: it is CONNECTION_LOST here.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        text = "the connection ended as the call began"
        raise Unavailable(text, reason=Reason.CONNECTION_LOST) from None
