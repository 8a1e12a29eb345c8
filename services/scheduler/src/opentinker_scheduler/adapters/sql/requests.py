"""Repositories of answered requests and of facts that are still to be announced."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, bindparam, delete, insert, select

from opentinker_kit.events import OutboxRow
from opentinker_scheduler.adapters.sql.tables import outbox, request_ids
from opentinker_scheduler.domain.names import new_id
from opentinker_scheduler.domain.records import Fact
from opentinker_scheduler.ports import StoredAnswer
from opentinker_scheduler.wire.events import event_of

_ADD_REQUEST, _ADD_FACT = insert(request_ids), insert(outbox)
_FIND_REQUEST = select(request_ids).where(
    request_ids.c.scope == bindparam("scope"), request_ids.c.request_id == bindparam("request_id")
)


class SqlRequests:
    """See `ports.RequestRepository`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def find(self, scope: str, request_id: str) -> StoredAnswer | None:
        asked = {"scope": scope, "request_id": request_id}
        row = self._connection.execute(_FIND_REQUEST, asked).one_or_none()
        return None if row is None else StoredAnswer(row.digest, row.response)

    def add(self, scope: str, request_id: str, answer: StoredAnswer, now: datetime) -> None:
        row = {
            "scope": scope,
            "request_id": request_id,
            "digest": answer.digest,
            "response": answer.response,
            "create_time": now,
        }
        self._connection.execute(_ADD_REQUEST, row)

    def forget_before(self, time: datetime) -> int:
        change = delete(request_ids).where(request_ids.c.create_time < time)
        return self._connection.execute(change).rowcount


class SqlOutbox:
    """See `ports.OutboxRepository`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.touched = False
        """Whether a fact was recorded."""

    def add(self, fact: Fact, now: datetime) -> None:
        self.touched = True
        value = {
            "kind": fact.kind,
            "subject": fact.subject,
            "detail": dict(fact.detail),
            "values": dict(fact.values),
        }
        row = {"event_id": fact.id or new_id("e"), "fact": value, "occur_time": now}
        self._connection.execute(_ADD_FACT, row)

    def pending(self, limit: int) -> Sequence[OutboxRow]:
        query = select(outbox).order_by(outbox.c.seq).limit(limit)
        rows = self._connection.execute(query)
        return [OutboxRow(row.seq, event_of(Fact(**row.fact), row.event_id, row.occur_time)) for row in rows]

    def delete(self, row_ids: Sequence[int]) -> None:
        self._connection.execute(delete(outbox).where(outbox.c.seq.in_(list(row_ids))))
