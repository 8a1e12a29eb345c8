"""How calls are made: errors become typed exceptions in one place, and what may be sent again is.

gRPC itself repeats a call a few times within seconds (service config). What is here outlives that: a
scheduler that is being restarted, a server that a job lost and gets back.
"""

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc.aio

from opentinker import errors
from opentinkerapi.runtime.calls import typed_errors
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.tls import TlsFiles, explained, is_secure, why_not

T = TypeVar("T")

PAUSE_S = 0.5
"""Between two tries of the same call."""

CONTROL_PATIENCE_S = 120.0
"""How long a scheduler may stay away before a call to it fails."""


async def answer(call: Awaitable[T]) -> T:
    """The answer of a unary call."""
    with typed_errors():
        return await call


async def stream(call: AsyncIterable[T]) -> AsyncIterator[T]:
    """The messages of a streaming call."""
    with typed_errors():
        async for message in call:
            yield message


class ControlPlane:
    """The way to the scheduler's services (jobs, runs, blobs, catalog), across restarts of the scheduler.

    `locate` gives its address now: an embedded scheduler that was restarted may listen elsewhere.
    `obituary` says why waiting is in vain (the embedded stack has ended), or None. `tls` is for every server
    of the cluster.
    """

    def __init__(
        self,
        locate: Callable[[], str],
        key: str | None,
        *,
        tls: TlsFiles | None = None,
        obituary: Callable[[], str | None] = lambda: None,
        patience_s: float = CONTROL_PATIENCE_S,
    ) -> None:
        self._locate = locate
        self._key = key
        self._tls = tls
        self._obituary = obituary
        self._patience_s = patience_s
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._retired: list[grpc.aio.Channel] = []

    @property
    def key(self) -> str | None:
        """The API key of the calls."""
        return self._key

    @property
    def address(self) -> str:
        """Where the scheduler was last."""
        return self._address or self._locate()

    def channel(self) -> grpc.aio.Channel:
        """The channel to where the scheduler is now. Must be used on the client's loop."""
        address = self._locate()
        if self._channel is None or address != self._address:
            if self._channel is not None:
                self._retired.append(self._channel)
            self._address = address
            self._channel = self.open(address)
        return self._channel

    def open(self, address: str, job_token: Callable[[], str] | None = None) -> grpc.aio.Channel:
        """A channel to a server of the cluster, with the credentials of this connection."""
        return open_channel(address, key=self._key, job_token=job_token, tls=self._tls)

    async def explained(self, error: errors.OpenTinkerError, address: str) -> errors.OpenTinkerError:
        """TlsFailed where that is why a server was not reached: waiting does not help."""
        return await explained(error, address, self._tls)

    async def check_tls(self, address: str) -> None:
        """TlsFailed where a server that is called by TLS cannot be. For calls that are not repeated."""
        if is_secure(address, self._tls) and (why := await asyncio.to_thread(why_not, address, self._tls)):
            raise errors.TlsFailed(why, reason=errors.Reason.TLS_FAILED)

    async def call(
        self, method: Callable[[grpc.aio.Channel], Awaitable[T]], *, patience_s: float | None = None
    ) -> T:
        """Make a call that may be repeated, until it is answered or the scheduler stays away too long."""
        patience = self._patience_s if patience_s is None else patience_s
        deadline = time.monotonic() + patience
        while True:
            try:
                return await answer(method(self.channel()))
            except errors.Unavailable as error:
                ended = self._obituary()
                if ended is not None:
                    raise errors.Unavailable(ended, reason=errors.Reason.CONNECTION_LOST) from None
                why = await self.explained(error, self._address)
                if why is not error:
                    raise why from None
                if time.monotonic() >= deadline:
                    raise errors.Unavailable(
                        f"the scheduler at {self._address} did not answer for {patience:.0f} s: "
                        f"{error.message}",
                        reason=error.reason,
                    ) from None
            except errors.Overloaded as error:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(error.retry_after_s or PAUSE_S)
            await asyncio.sleep(PAUSE_S)

    async def close(self) -> None:
        """Close the channels."""
        channels, self._retired = [*self._retired, self._channel], []
        self._channel = None
        for channel in channels:
            if channel is not None:
                await channel.close()
