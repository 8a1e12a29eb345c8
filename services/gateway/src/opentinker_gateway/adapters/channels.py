"""Channels to servers, one for each address, and what goes wrong on them as errors of the catalogue."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator

import grpc
import grpc.aio

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.status import from_trailers
from opentinkerapi.runtime.tls import TlsFiles, why_not

MAX_CHANNELS = 256


@contextlib.contextmanager
def typed_failures() -> Iterator[None]:
    """Turn a failed call into the ServiceError that the other side raised."""
    try:
        yield
    except grpc.RpcError as error:
        raise failure(error) from None


def failure(error: grpc.RpcError) -> ServiceError:
    """What a failed call means."""
    trailers = error.trailing_metadata() if isinstance(error, grpc.aio.AioRpcError) else None
    status = from_trailers(tuple(trailers) if trailers is not None else None)
    if status is not None:
        return ServiceError.from_status(status)
    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServiceError(Reason.DEADLINE_EXCEEDED)
    if code is grpc.StatusCode.UNAVAILABLE or code is grpc.StatusCode.CANCELLED:
        return ServiceError(Reason.CONNECTION_LOST, "a server behind the gateway cannot be reached")
    return ServiceError(Reason.INTERNAL, f"a server behind the gateway failed ({code.name})")


class Channels:
    """Keeps the channels that are in use; the one not used for longest goes first."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self._tls = tls
        self._open: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    async def to(self, address: str) -> grpc.aio.Channel:
        """The channel to an address. Credentials go with each call, never with the channel."""
        if address not in self._open:
            self._open[address] = open_channel(address, tls=self._tls)
            if len(self._open) > MAX_CHANNELS:
                _, oldest = self._open.popitem(last=False)
                # What runs on it may end.
                await oldest.close(grace=60.0)
        self._open.move_to_end(address)
        return self._open[address]

    async def why_not(self, address: str) -> str:
        """Why TLS keeps an address from being reached; empty if it does not."""
        return await asyncio.to_thread(why_not, address, self._tls)

    async def close(self) -> None:
        """Close them all."""
        while self._open:
            _, channel = self._open.popitem()
            await channel.close()
