"""The operation queue: examples, and a state machine against a model of what a client may expect."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.queue import WINDOW, Entry, PolicyQueue
from opentinkerapi.runtime.reasons import Reason


def entry(seq: int, body: str = "body") -> Entry:
    return Entry(seq, f"r{seq}", body)


def log(queue: PolicyQueue, *seqs: int, now: float = 0.0) -> None:
    for seq in seqs:
        assert queue.reserve(entry(seq), now)
        queue.mark_logged(seq, now)


def run(queue: PolicyQueue) -> int:
    seq = queue.next_to_run()
    assert seq is not None
    queue.start(seq)
    queue.end(seq)
    return seq


def refusal(queue: PolicyQueue, wrong: Entry) -> Reason:
    with pytest.raises(ServiceError) as caught:
        queue.reserve(wrong, 0.0)
    return caught.value.reason


def test_operations_run_in_seq_order_whatever_the_order_of_arrival() -> None:
    queue = PolicyQueue()
    log(queue, 3, 2)
    assert queue.next_to_run() is None
    assert not queue.is_acknowledgeable(3)
    log(queue, 1)
    assert queue.is_acknowledgeable(3)
    assert [run(queue) for _ in range(3)] == [1, 2, 3]
    assert queue.next_to_run() is None


def test_a_repetition_is_known_and_another_body_is_refused() -> None:
    """B93."""
    queue = PolicyQueue()
    log(queue, 1)
    assert not queue.reserve(entry(1), 0.0)
    run(queue)
    assert not queue.reserve(entry(1), 0.0)
    assert refusal(queue, entry(1, "other")) is Reason.REQUEST_ID_REUSED
    assert refusal(queue, Entry(1, "other", "body")) is Reason.SEQ_REUSED
    assert refusal(queue, Entry(2, "r1", "body")) is Reason.REQUEST_ID_REUSED


def test_seqs_outside_the_window_are_refused() -> None:
    queue = PolicyQueue()
    assert refusal(queue, entry(0)) is Reason.INVALID_FIELD
    assert refusal(queue, entry(WINDOW + 1)) is Reason.QUOTA_EXCEEDED
    log(queue, 1)
    run(queue)
    queue.acknowledge(1)
    assert queue.cut(recovery_seq=1) == [1]
    assert refusal(queue, entry(1)) is Reason.OPERATION_NOT_FOUND


def test_results_are_kept_until_acknowledged_and_the_log_until_recovered() -> None:
    queue = PolicyQueue()
    log(queue, 1, 2, 3)
    run(queue)
    run(queue)
    with pytest.raises(ServiceError, match="acked_seq 4 is beyond 3"):
        queue.acknowledge(4)
    assert queue.acknowledge(2) == [1, 2]
    assert queue.acknowledge(1) == []
    assert queue.cut(recovery_seq=1) == [1]
    assert queue.entry(1) is None
    assert queue.entry(2) is not None


def test_a_gap_that_stays_refuses_what_waits_behind_it() -> None:
    queue = PolicyQueue()
    log(queue, 1, now=0.0)
    log(queue, 3, 4, now=10.0)
    assert queue.expire_gap(69.0, 60.0) is None
    gap = queue.expire_gap(70.0, 60.0)
    assert gap is not None
    assert (gap.next_seq, gap.waiting) == (2, (3, 4))
    assert queue.expire_gap(500.0, 60.0) is None
    log(queue, 2, 3, now=500.0)
    assert [run(queue) for _ in range(3)] == [1, 2, 3]


def test_a_seq_that_is_still_on_its_way_is_no_gap() -> None:
    queue = PolicyQueue()
    queue.reserve(entry(1), 0.0)
    log(queue, 2, now=0.0)
    assert queue.expire_gap(1000.0, 60.0) is None
    queue.release(1, 1000.0)
    assert queue.expire_gap(1059.0, 60.0) is None
    assert queue.expire_gap(1060.0, 60.0) is not None


def test_a_restart_runs_again_what_the_checkpoint_does_not_hold() -> None:
    queue = PolicyQueue.restored([entry(seq) for seq in (4, 5, 6, 7)], ended_seq=5, acked_seq=3)
    assert queue.next_seq == 8
    assert not queue.reserve(entry(4), 0.0)
    assert [run(queue) for _ in range(2)] == [6, 7]
    assert refusal(queue, entry(3)) is Reason.OPERATION_NOT_FOUND
    empty = PolicyQueue.restored([], ended_seq=9, acked_seq=9)
    assert (empty.next_seq, empty.next_to_run()) == (10, None)


class QueueMachine(RuleBasedStateMachine):
    """Clients send seqs in any order, twice, with wrong bodies; logging fails; processes crash; a client may
    acknowledge what a restarted process has yet to run again.

    The model: what was acknowledged runs exactly once in order, as seen by whoever keeps the engine's state
    (`applied`), which a crash throws back to the last recovery checkpoint.
    """

    @initialize()
    def setup(self) -> None:
        self.queue = PolicyQueue()
        self.now = 0.0
        self.durable: dict[int, Entry] = {}
        self.reserved: set[int] = set()
        self.promised: set[int] = set()
        self.applied: list[int] = []
        self.recovery = 0
        self.seen = 0

    @rule(ahead=st.integers(0, 4))
    def send(self, ahead: int) -> None:
        seq = self.queue.contiguous + 1 + ahead
        if self.queue.reserve(entry(seq), self.now):
            assert seq not in self.durable
            self.reserved.add(seq)
        self._promise()

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), succeeds=st.booleans())
    def finish_logging(self, data: st.DataObject, succeeds: bool) -> None:
        seq = data.draw(st.sampled_from(sorted(self.reserved)))
        self.reserved.discard(seq)
        if succeeds:
            self.durable[seq] = entry(seq)
            self.queue.mark_logged(seq, self.now)
        else:
            self.queue.release(seq, self.now)
        self._promise()

    @precondition(lambda self: self.durable)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.durable)))
        assert not self.queue.reserve(entry(seq), self.now)
        with pytest.raises(ServiceError):
            self.queue.reserve(entry(seq, "other"), self.now)

    @rule()
    def run_next(self) -> None:
        seq = self.queue.next_to_run()
        if seq is not None:
            self.queue.start(seq)
            assert seq == len(self.applied) + 1
            self.applied.append(seq)
            self.queue.end(seq)

    @rule()
    def engine_lost_while_running(self) -> None:
        seq = self.queue.next_to_run()
        if seq is not None:
            self.queue.start(seq)
            self.queue.interrupt()
            assert self.queue.next_to_run() == seq

    @rule(behind=st.integers(0, 3))
    def checkpoint_and_acknowledge(self, behind: int) -> None:
        self.recovery = max(self.recovery, self.queue.ended_seq - behind)
        self.seen = max(self.seen, self.queue.ended_seq - behind)
        self.queue.acknowledge(self.seen)
        for seq in self.queue.cut(self.recovery):
            del self.durable[seq]

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        gap = self.queue.expire_gap(self.now, 60.0)
        if gap is not None:
            assert gap.next_seq not in self.durable
            assert not set(gap.waiting) & self.promised
            for seq in gap.waiting:
                self.durable.pop(seq, None)
                self.reserved.discard(seq)

    @rule()
    def crash(self) -> None:
        """The process dies. The log comes back without its loose end, the rest from the checkpoint."""
        end = self.recovery
        while end + 1 in self.durable:
            end += 1
        for seq in [seq for seq in self.durable if seq > end]:
            assert seq not in self.promised
            del self.durable[seq]
        self.reserved.clear()
        self.queue = PolicyQueue.restored(
            self.durable.values(), self.recovery, min(self.recovery, self.queue.acked_seq)
        )
        self.applied = self.applied[: self.recovery]

    @invariant()
    def nothing_promised_is_lost(self) -> None:
        assert all(
            seq in self.durable or seq <= min(self.recovery, len(self.applied)) for seq in self.promised
        )
        assert self.applied == list(range(1, len(self.applied) + 1))
        assert self.queue.ended_seq == len(self.applied)

    def _promise(self) -> None:
        self.promised |= {seq for seq in self.durable if self.queue.is_acknowledgeable(seq)}


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
