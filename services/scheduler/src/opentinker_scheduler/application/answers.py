"""Exactly once: a request with a request id is done and its answer kept in one transaction."""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from opentinker_kit.auth import current_principal
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_scheduler.ports import Database, StoredAnswer, Transaction
from opentinkerapi.runtime.reasons import Reason

M = TypeVar("M", bound=Message)

MAX_REQUEST_ID = 128


class Answers:
    """Does work once for each request id, and gives the first answer again to whoever asks again."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def once(
        self,
        request: Message,
        response_type: type[M],
        work: Callable[[Transaction], M],
        *,
        ignore: Collection[str] = (),
    ) -> M:
        """The answer to a request that carries `request_id`; `work` runs only if it was not asked before.

        Another body under the same id is REQUEST_ID_REUSED. Fields named in `ignore` may differ between
        tries: they say who sends the request, not what it asks. A refusal is not kept: nothing happened.
        """
        key = _key(request, ignore)

        def run(tx: Transaction) -> M:
            if stored := _stored(tx, key):
                return response_type.FromString(stored.response)
            response = work(tx)
            answer = StoredAnswer(key.digest, response.SerializeToString())
            tx.requests.add(key.scope, key.request_id, answer, self._clock.now())
            return response

        return await self._database.run(run)

    async def given(self, request: Message, response_type: type[M]) -> M | None:
        """What a request was answered before: for requests that must be looked into outside a transaction,
        which may find things changed since then.
        """
        key = _key(request, ())
        stored = await self._database.run(lambda tx: _stored(tx, key))
        return None if stored is None else response_type.FromString(stored.response)


@dataclass(frozen=True, slots=True)
class _Key:
    """Under what an answer is kept, and for which body."""

    scope: str
    request_id: str
    digest: str


def _key(request: Message, ignore: Collection[str]) -> _Key:
    request_id = _request_id(request)
    scope = f"{current_principal().project}/{request.DESCRIPTOR.full_name}"
    return _Key(scope, request_id, _digest(request, ignore))


def _stored(tx: Transaction, key: _Key) -> StoredAnswer | None:
    stored = tx.requests.find(key.scope, key.request_id)
    if stored is not None and stored.digest != key.digest:
        text = f"request_id {key.request_id!r} was used before with another request"
        raise ServiceError(Reason.REQUEST_ID_REUSED, text, field="request_id")
    return stored


def _request_id(request: Message) -> str:
    request_id: str = getattr(request, "request_id")  # noqa: B009 - which messages have it, Message cannot say
    if len(request_id) > MAX_REQUEST_ID:
        text = f"request_id has {len(request_id)} characters; at most {MAX_REQUEST_ID} are allowed"
        raise ServiceError(Reason.INVALID_FIELD, text, field="request_id")
    return request_id


def _digest(request: Message, ignore: Collection[str]) -> str:
    body = type(request)()
    body.CopyFrom(request)
    for name in ("request_id", *ignore):
        body.ClearField(name)
    return hashlib.sha256(body.SerializeToString(deterministic=True)).hexdigest()
