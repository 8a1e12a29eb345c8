"""Leases against a model that knows nothing but deadlines: never lost early, never held late."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from opentinker_scheduler.domain.leases import LeaseTable

HOLDERS = st.sampled_from(["a", "b", "c"])


class LeaseMachine(RuleBasedStateMachine):
    """Grants, renewals, releases and time in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.now = 0.0
        self.model: dict[str, tuple[float, float]] = {}

    @rule(holder=HOLDERS, ttl=st.integers(1, 20))
    def grant(self, holder: str, ttl: int) -> None:
        self.table.grant(holder, ttl, self.now)
        self.model[holder] = (ttl, self.now + ttl)

    @rule(holder=HOLDERS)
    def renew(self, holder: str) -> None:
        live = holder in self.model and self.now < self.model[holder][1]
        assert self.table.renew(holder, self.now) is live
        if live:
            ttl, deadline = self.model[holder]
            self.model[holder] = (ttl, max(deadline, self.now + ttl))

    @rule(holder=HOLDERS)
    def release(self, holder: str) -> None:
        self.table.release(holder)
        self.model.pop(holder, None)

    @rule(seconds=st.floats(0, 15))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.floats(0, 30))
    def leader_stood_still(self, seconds: float) -> None:
        self.now += seconds
        self.table.extend_all(seconds)
        self.model = {holder: (ttl, deadline + seconds) for holder, (ttl, deadline) in self.model.items()}

    @invariant()
    def agrees(self) -> None:
        assert self.table.holders() == frozenset(self.model)
        for holder, (_, deadline) in self.model.items():
            assert self.table.holds(holder, self.now) is (self.now < deadline)
            assert self.table.remaining(holder, self.now) == pytest.approx(max(0.0, deadline - self.now))
        over = [holder for holder, (_, deadline) in self.model.items() if self.now >= deadline]
        assert set(self.table.over(self.now)) == set(over)


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_lease_needs_time() -> None:
    with pytest.raises(ValueError, match="positive"):
        LeaseTable().grant("a", 0.0, 0.0)


def test_the_longest_overdue_comes_first() -> None:
    table = LeaseTable()
    table.grant("late", 5, 0.0)
    table.grant("later", 2, 0.0)
    assert table.over(4.0) == ["later"]
    assert table.over(6.0) == ["later", "late"]
