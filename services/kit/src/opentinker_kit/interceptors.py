"""What happens around every call: who calls, what is required, how it failed, one log line.

One interceptor wraps the four kinds of handlers, so that the order cannot be got wrong: authorize (before the
request is parsed), bind the call's ids for logging, check sizes, required fields and the job token, run the
handler, turn what it raised into a status, tell the observer.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog

from opentinker_kit.auth import AuthPolicy, Principal, set_principal
from opentinker_kit.errors import ServiceError, internal_error, new_error_id
from opentinker_kit.required import check_required, is_checked_by
from opentinkerapi.runtime import tracing
from opentinkerapi.runtime.channels import MAX_MESSAGE_BYTES
from opentinkerapi.runtime.reasons import CATALOGUE, Reason
from opentinkerapi.runtime.status import DETAILS_KEY

log = structlog.get_logger()

REQUEST_ID = "x-request-id"
"""Metadata with an id that the caller gave the call, for finding it in logs."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_QUIET = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Methods that are logged only when they fail."""


class _TooLarge:
    """Stands for a request that was not parsed."""

    def __init__(self, size: int) -> None:
        self.size = size


@dataclass(frozen=True, slots=True)
class EndedCall:
    """A call that is over, for who keeps a record of calls."""

    method: str
    principal: Principal | None
    """None where it was refused before anybody knew who called."""
    request: Any
    """The request, of a stream its first message; None where it was refused before it was parsed."""
    response: Any
    """The response; None for a stream, and for a failure."""
    outcome: str
    """OK, or the reason."""
    peer: str
    seconds: float = 0.0
    """How long it took; 0 where it was refused at the door."""


Observer = Callable[[EndedCall], None]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """See the module's text."""

    def __init__(self, auth: AuthPolicy, observer: Observer | None = None) -> None:
        self._auth = auth
        self._observer = observer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        principal: Principal | None = None
        try:
            principal = await self._auth.identify(method, handler_call_details.invocation_metadata or ())
            self._auth.permit(method, principal)
        except ServiceError as error:
            return _refusal(error, self._observer, method, principal)
        handler = await continuation(handler_call_details)
        if handler is None:
            return _refusal(ServiceError(Reason.UNIMPLEMENTED, f"this server has no method {method}"))
        metadata = dict(handler_call_details.invocation_metadata or ())
        request_id = str(metadata.get(REQUEST_ID, ""))
        return _wrap(handler, _Call(self._auth, self._observer, method, principal, request_id))


class _Call:
    """One call, from its handler's start to its end."""

    def __init__(
        self,
        auth: AuthPolicy,
        observer: Observer | None,
        method: str,
        principal: Principal,
        request_id: str,
    ) -> None:
        self.method = method
        self._auth = auth
        self._observer = observer
        self._principal = principal
        self._request_id = request_id or secrets.token_hex(6)
        self._request: Any = None
        self.response: Any = None

    @contextlib.asynccontextmanager
    async def around(self, context: Any) -> AsyncIterator[None]:
        """Bind the call's ids, run its body, answer with a status if it raises, log how it ended."""
        set_principal(self._principal)
        end_span = self._begin_span(context)
        structlog.contextvars.bind_contextvars(method=self.method, call=self._request_id)
        start = time.perf_counter()
        failure: ServiceError | None = None
        outcome = "OK"
        try:
            yield
        except ServiceError as error:
            failure, outcome = error, error.reason
        except grpc.aio.AbortError:
            outcome = "ABORTED_BY_HANDLER"
            raise
        except asyncio.CancelledError:
            outcome = "CANCELLED"
            raise
        except NotImplementedError:
            failure = ServiceError(Reason.UNIMPLEMENTED, f"{self.method} is not available on this server")
            outcome = failure.reason
        except Exception:
            error_id = new_error_id()
            failure, outcome = internal_error(error_id), "INTERNAL"
            log.exception("call failed unexpectedly", error_id=error_id, **self._for_job())
        finally:
            seconds = time.perf_counter() - start
            self._log(outcome, failure, seconds)
            self._tell(str(outcome), context, seconds)
            end_span(str(outcome))
        if failure is not None:
            await abort(context, failure)

    def _begin_span(self, context: Any) -> tracing.Ended:
        if not tracing.is_on() or self.method.startswith(_QUIET):
            return _ignore
        return tracing.serving(self.method, context.invocation_metadata() or ())

    async def admit(self, request: Any, *, complete: bool = True) -> Any:
        """The request, if its handler may have it: parsed, complete, and for a job where that is needed."""
        checked = check_request(request, complete=complete)
        if self._request is None:
            self._request = checked
            self._principal = await self._auth.for_request(self.method, self._principal, checked)
            set_principal(self._principal)
        return checked

    async def admit_each(self, requests: AsyncIterator[Any], *, complete: bool = True) -> AsyncIterator[Any]:
        """The messages of a stream, each checked. The first one says for which job; where they have tokens of
        their own, so does each, and none is taken with a token that is too old by then.
        """
        async for request in requests:
            first = self._request is None
            checked = await self.admit(request, complete=complete)
            if not first:
                renewed = await self._auth.for_message(self.method, self._principal, checked)
                if renewed is not self._principal:
                    self._principal = renewed
                    set_principal(renewed)
            yield checked

    def _log(self, outcome: str, failure: ServiceError | None, seconds: float) -> None:
        fields: dict[str, object] = {"outcome": str(outcome), "ms": round(seconds * 1000, 1)}
        fields |= self._for_job()
        if failure is not None:
            log.info("call", message=failure.message, **fields)
        elif not self.method.startswith(_QUIET):
            log.debug("call", **fields)

    def _for_job(self) -> dict[str, str]:
        """The job that the call is for. Not bound to all of its lines: what it sets going may be shared."""
        return {"job": self._principal.job} if self._principal.job else {}

    def _tell(self, outcome: str, context: Any, seconds: float) -> None:
        if self._observer is not None:
            response = self.response if outcome == "OK" else None
            self._observer(
                EndedCall(
                    self.method, self._principal, self._request, response, outcome, context.peer(), seconds
                )
            )


def _ignore(_: str) -> None:
    return None


async def abort(context: Any, error: ServiceError) -> None:
    """End a call with this error and its details."""
    status = error.to_status()
    await context.abort(
        error.code, status.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),)
    )


def check_request(request: Any, *, complete: bool = True) -> Any:
    """The request, if it was parsed and all that is required is there; otherwise a ServiceError. Without
    `complete` its handler looks at the latter.
    """
    if isinstance(request, _TooLarge):
        text = CATALOGUE[Reason.MESSAGE_TOO_LARGE].message
        raise ServiceError(
            Reason.MESSAGE_TOO_LARGE,
            f"{text} (it has {request.size} bytes)",
            metadata={"bytes": request.size},
        )
    if complete:
        check_required(request)
    return request


def _refusal(
    error: ServiceError,
    observer: Observer | None = None,
    method: str = "",
    principal: Principal | None = None,
) -> Handler:
    """A handler of any kind of call that answers with an error and parses nothing."""

    async def refuse(requests: Any, context: Any) -> AsyncIterator[bytes]:
        if observer is not None:
            observer(EndedCall(method, principal, None, None, str(error.reason), context.peer()))
        await abort(context, error)
        yield b""

    return grpc.stream_stream_rpc_method_handler(refuse)


def _wrap(handler: Any, call: _Call) -> Handler:
    deserialize = _bounded(handler.request_deserializer)
    serialize = handler.response_serializer
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(
            _streaming(handler.stream_stream, call, streams=True), deserialize, serialize
        )
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(
            _streaming(handler.unary_stream, call, streams=False), deserialize, serialize
        )
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(
            _single(handler.stream_unary, call, streams=True), deserialize, serialize
        )
    return grpc.unary_unary_rpc_method_handler(
        _single(handler.unary_unary, call, streams=False), deserialize, serialize
    )


def _single(behavior: Any, call: _Call, *, streams: bool) -> Any:
    async def run(request: Any, context: Any) -> Any:
        async with call.around(context):
            admitted = call.admit_each(request) if streams else await call.admit(request)
            call.response = await behavior(admitted, context)
            return call.response

    return run


def _streaming(behavior: Any, call: _Call, *, streams: bool) -> Any:
    # A handler is an async generator, or a coroutine that writes to the context.
    async def run(request: Any, context: Any) -> AsyncIterator[Any]:
        async with call.around(context):
            if streams:
                admitted = call.admit_each(request, complete=not is_checked_by(behavior))
            else:
                admitted = await call.admit(request)
            result = behavior(admitted, context)
            if not hasattr(result, "__aiter__"):
                await result
                return
            async with contextlib.aclosing(result):
                async for response in result:
                    yield response

    return run


def _bounded(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """A deserializer that leaves messages over the limit unparsed, so that the refusal says what to do."""
    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:
        return _TooLarge(len(data)) if len(data) > MAX_MESSAGE_BYTES else deserialize(data)

    return parse
