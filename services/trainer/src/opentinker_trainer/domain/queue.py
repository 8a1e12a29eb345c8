"""Order and idempotency of one policy's operations, whatever the order in which requests arrive.

An operation is reserved (its body is on the way into the log), then logged; it is acknowledged once
everything before it is logged too, so that the log never has a hole that somebody was told of. Operations
run in seq order, one at a time; each ends once and is consumed. Ended operations are remembered until the
client has acknowledged their results. A seq that stays missing while later ones wait is a gap: after a time
the later ones are refused, and nobody was promised anything.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

WINDOW = 4096
"""How far beyond the next seq a request may be."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What identifies an operation."""

    seq: int
    request_id: str
    digest: str
    """Of the whole body; a repetition has the same."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A seq that is missing while later ones wait."""

    next_seq: int
    waiting: tuple[int, ...]


@dataclass(slots=True)
class PolicyQueue:
    """See the module's text. `first` is the lowest seq that is not forgotten."""

    first: int = 1
    ended_seq: int = 0
    """Everything up to here has ended."""
    acked_seq: int = 0
    """The client has the results of everything up to here."""
    _entries: dict[int, Entry] = field(default_factory=dict)
    _by_request: dict[str, int] = field(default_factory=dict)
    _logged: set[int] = field(default_factory=set)
    _contiguous: int = 0
    _running: int | None = None
    _gap_since: float | None = None

    @classmethod
    def restored(cls, entries: Iterable[Entry], ended_seq: int, acked_seq: int) -> "PolicyQueue":
        """A queue from the log of an earlier process: logged entries without holes.

        `ended_seq` is where the recovery checkpoint stands; what comes after it runs again. Results up to
        `acked_seq` are gone.
        """
        queue = cls()
        ordered = sorted(entries, key=lambda entry: entry.seq)
        queue.first = ordered[0].seq if ordered else ended_seq + 1
        queue.ended_seq = queue._contiguous = ended_seq
        queue.acked_seq = acked_seq
        for entry in ordered:
            queue._add(entry)
            queue._logged.add(entry.seq)
        queue._advance()
        return queue

    @property
    def next_seq(self) -> int:
        """The lowest seq that is neither logged nor on its way into the log."""
        seq = self._contiguous + 1
        while seq in self._entries:
            seq += 1
        return seq

    @property
    def contiguous(self) -> int:
        """Everything up to here is logged."""
        return self._contiguous

    @property
    def running(self) -> int | None:
        """The operation in the engine."""
        return self._running

    def entry(self, seq: int) -> Entry | None:
        """What is known of an operation that is not forgotten."""
        return self._entries.get(seq)

    def reserve(self, entry: Entry, now: float) -> bool:
        """Claim a seq for a request; False if it is a repetition of one that is known.

        ServiceError: SEQ_REUSED or REQUEST_ID_REUSED for another body, OPERATION_NOT_FOUND for one whose
        result was acknowledged, QUOTA_EXCEEDED for one too far ahead, INVALID_FIELD for one below 1.
        """
        if entry.seq < 1:
            raise ServiceError(Reason.INVALID_FIELD, "seq counts from 1", field="header.seq")
        known = self._entries.get(entry.seq)
        if known is not None:
            if known == entry:
                return False
            raise self._reused(known, entry)
        other = self._by_request.get(entry.request_id)
        if other is not None:
            text = f"request_id {entry.request_id!r} belongs to seq {other}"
            raise ServiceError(Reason.REQUEST_ID_REUSED, text, field="header.request_id")
        if entry.seq < self.first or entry.seq <= self._contiguous:
            text = f"seq {entry.seq} has ended and its result was acknowledged; next_seq is {self.next_seq}"
            raise ServiceError(Reason.OPERATION_NOT_FOUND, text, metadata={"next_seq": self.next_seq})
        if entry.seq > self._contiguous + WINDOW:
            text = f"seq {entry.seq} is more than {WINDOW} beyond {self._contiguous}"
            raise ServiceError(
                Reason.QUOTA_EXCEEDED, text, quota=[("operations in flight", text)], retry_after_s=1.0
            )
        self._add(entry)
        self._note_gap(now)
        return True

    def mark_logged(self, seq: int, now: float) -> None:
        """The whole body of a reserved operation is in the log."""
        if seq in self._entries:
            self._logged.add(seq)
            self._advance()
            self._note_gap(now)

    def release(self, seq: int, now: float) -> None:
        """A reserved operation could not be logged; its seq is free again."""
        if seq not in self._logged:
            self._forget(seq)
            self._note_gap(now)

    def is_acknowledgeable(self, seq: int) -> bool:
        """Whether an operation is logged and so is everything before it."""
        return seq <= self._contiguous

    def next_to_run(self) -> int | None:
        """The operation whose turn it is, unless one runs."""
        seq = self.ended_seq + 1
        return seq if self._running is None and seq <= self._contiguous else None

    def start(self, seq: int) -> None:
        """The operation whose turn it is begins."""
        assert seq == self.next_to_run(), f"{seq} is not the next one"
        self._running = seq

    def interrupt(self) -> None:
        """The running operation was lost with its engine; it is its turn again."""
        self._running = None

    def end(self, seq: int) -> None:
        """The running operation ended, DONE or FAILED; it is consumed."""
        assert seq == self._running, f"{seq} does not run"
        self._running = None
        self.ended_seq = seq

    def acknowledge(self, acked_seq: int) -> list[int]:
        """The client has received results up to `acked_seq`; the seqs whose results may be dropped.

        After a restart that may include operations that run again. INVALID_FIELD if it is more than is
        logged.
        """
        if acked_seq > self._contiguous:
            text = f"acked_seq {acked_seq} is beyond {self._contiguous}, the last operation that was logged"
            raise ServiceError(Reason.INVALID_FIELD, text, field="header.acked_seq")
        dropped = list(range(self.acked_seq + 1, min(acked_seq, self.ended_seq) + 1))
        self.acked_seq = max(self.acked_seq, acked_seq)
        return dropped

    def cut(self, recovery_seq: int) -> list[int]:
        """Forget what neither a restart nor the client needs: up to checkpoint and acknowledgement."""
        end = min(recovery_seq, self.acked_seq, self.ended_seq)
        dropped = [seq for seq in range(self.first, end + 1) if seq in self._entries]
        for seq in dropped:
            self._forget(seq)
        self.first = max(self.first, end + 1)
        return dropped

    def gap(self) -> Gap | None:
        """What is missing now, and what waits for it."""
        missing = self.next_seq
        waiting = tuple(sorted(seq for seq in self._entries if seq > missing))
        return Gap(missing, waiting) if waiting else None

    def expire_gap(self, now: float, timeout_s: float) -> Gap | None:
        """If a gap is older than `timeout_s`: refuse what waits behind it, and say what that was."""
        self._note_gap(now)
        gap = self.gap()
        if gap is None or self._gap_since is None or now - self._gap_since < timeout_s:
            return None
        for seq in gap.waiting:
            self._forget(seq)
        self._gap_since = None
        return gap

    def _note_gap(self, now: float) -> None:
        if self.gap() is None:
            self._gap_since = None
        elif self._gap_since is None:
            self._gap_since = now

    def _add(self, entry: Entry) -> None:
        self._entries[entry.seq] = entry
        self._by_request[entry.request_id] = entry.seq

    def _forget(self, seq: int) -> None:
        entry = self._entries.pop(seq, None)
        if entry is not None:
            self._by_request.pop(entry.request_id, None)
            self._logged.discard(seq)

    def _advance(self) -> None:
        while self._contiguous + 1 in self._logged:
            self._contiguous += 1

    def _reused(self, known: Entry, given: Entry) -> ServiceError:
        metadata = {"seq": known.seq}
        if known.request_id == given.request_id:
            text = f"request_id {known.request_id!r} was used with another body"
            return ServiceError(Reason.REQUEST_ID_REUSED, text, field="header.request_id", metadata=metadata)
        text = f"seq {known.seq} belongs to request_id {known.request_id!r}"
        return ServiceError(Reason.SEQ_REUSED, text, field="header.seq", metadata=metadata)
