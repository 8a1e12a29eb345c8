"""Jobs of higher priority displace others: as few as will do, never equals; nobody else takes the room."""

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from services.scheduler.tests.simulation import OPTIONS

from opentinker_scheduler.domain.floor import Capacity, Demand, Floor, Need
from opentinker_scheduler.domain.limits import Limits
from opentinker_scheduler.domain.model import Role
from opentinker_scheduler.domain.planner import Cluster, Plan, make_plan
from opentinker_scheduler.domain.preemption import Candidate, displace
from opentinker_scheduler.domain.reservations import Tenure


def wish(job: str, slots: int, priority: int = 5, **more: object) -> Demand:
    needs = tuple(Need(0, i, Role.TRAINER, "m", OPTIONS) for i in range(slots))
    return Demand(job, needs, priority=priority, **more)  # type: ignore[arg-type]


def server(name: str, free: int, *owners: str) -> Capacity:
    """A server that registered itself, with a slot for each of the owners and some free ones."""
    taken = dict(enumerate(owners))
    slots = [len(owners) + number for number in range(free)]
    return Capacity(name, Role.TRAINER, "m", OPTIONS, slots, jobs=set(owners), launched=False, taken=taken)


def chosen(demand: Demand, *servers: Capacity, running: dict[str, tuple[int, float]]) -> list[str] | None:
    """Who gives way, of jobs with priority and start."""
    floor = Floor(servers, Limits(can_launch=False), {}, lambda: "none")
    candidates = [Candidate(job, priority, since) for job, (priority, since) in running.items()]
    return displace(demand, floor, list(running), candidates)


def test_the_least_urgent_and_of_those_the_youngest_goes() -> None:
    running = {"old": (0, 1.0), "young": (0, 9.0), "urgent": (3, 99.0)}
    assert chosen(wish("j", 1), server("s", 0, "old", "young", "urgent"), running=running) == ["young"]
    two = chosen(wish("j", 2), server("s", 0, "old", "young", "urgent"), running=running)
    assert two == ["young", "old"]


def test_equals_stay() -> None:
    running = {"a": (5, 1.0), "b": (6, 1.0)}
    assert chosen(wish("j", 1), server("s", 0, "a", "b"), running=running) is None


def test_nobody_goes_in_vain() -> None:
    """Three slots would be needed, and only two are held by jobs that would give way."""
    running = {"a": (0, 1.0), "b": (0, 1.0), "c": (5, 1.0)}
    assert chosen(wish("j", 3), server("s", 0, "a", "b", "c"), running=running) is None


def test_who_holds_nothing_of_use_stays() -> None:
    """The youngest is on a server of another kind."""
    other = server("t", 0, "youngest")
    other.base_model = "n"
    running = {"youngest": (0, 9.0), "a": (0, 1.0)}
    assert chosen(wish("j", 1), other, server("s", 0, "a"), running=running) == ["a"]


def test_while_slots_are_being_freed_nobody_else_goes() -> None:
    floor = Floor([server("s", 0, "gone", "a")], Limits(can_launch=False), {}, lambda: "none")
    assert displace(wish("j", 1), floor, ["a"], [Candidate("a", 0, 1.0)]) == []


def plan(
    *demands: Demand,
    servers: list[Capacity],
    running: dict[str, int],
    on: bool = True,
    yielding: bool = False,
) -> Plan:
    """A plan with preemption, of running jobs by priority; nothing is kept for long waits."""
    candidates = [Candidate(job, priority, 0.0) for job, priority in running.items()]
    cluster = Cluster(
        Limits(can_launch=False, reserve_after_s=1e9),
        tenures=lambda: [Tenure(job) for job in running],
        candidates=(lambda: candidates) if on else None,
        yielding=yielding,
    )
    return make_plan(demands, deepcopy(servers), cluster, lambda: "none")


def test_what_they_leave_is_for_the_one_they_left_it_to() -> None:
    servers = [server("s", 2, "a", "b")]
    small = wish("small", 1, priority=0)
    made = plan(wish("large", 4), small, servers=servers, running={"a": 0, "b": 0})
    assert sorted(made.preempted) == ["a", "b"]
    # Two slots are free, and the small job would fit: they are kept.
    assert made.grants == []
    # As they are being freed it is the same, and nobody else has to go.
    made = plan(wish("large", 4), small, servers=servers, running={}, yielding=True)
    assert (made.preempted, made.grants) == ([], [])


def test_without_the_setting_everyone_stays() -> None:
    made = plan(wish("large", 4), servers=[server("s", 2, "a", "b")], running={"a": 0, "b": 0}, on=False)
    assert made.preempted == []


RUNNING = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 3)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(jobs=RUNNING, slots=st.integers(1, 8), priority=st.integers(0, 3))
def test_as_few_as_will_do(jobs: list[tuple[int, int, int]], slots: int, priority: int) -> None:
    """Whoever goes has a lower priority; together they make room; none of them could have stayed."""
    owners: dict[str, list[str]] = {"s0": [], "s1": [], "s2": []}
    running: dict[str, tuple[int, float]] = {}
    for number, (where, held, urgency) in enumerate(jobs):
        owners[f"s{where}"] += [f"j{number}"] * held
        running[f"j{number}"] = (urgency, float(number))
    servers = [server(name, 1, *jobs_there) for name, jobs_there in owners.items()]
    demand = wish("it", slots, priority)
    free = 3

    def room(gone: list[str]) -> int:
        return free + sum(job in gone for there in owners.values() for job in there)

    victims = chosen(demand, *servers, running=running)
    lower = [job for job, (urgency, _) in running.items() if urgency < priority]
    if slots <= free:
        assert victims == []
    elif victims is None:
        assert room(lower) < slots
    else:
        assert set(victims) <= set(lower)
        assert room(victims) >= slots
        for victim in victims:
            assert room([other for other in victims if other != victim]) < slots


@pytest.mark.parametrize("priority", [0, 1])
def test_a_small_urgent_job_displaces_one_of_many(priority: int) -> None:
    made = plan(
        wish("urgent", 1, priority),
        servers=[server("s", 0, "a", "b"), server("t", 0, "c", "d")],
        running=dict.fromkeys("abcd", 0),
    )
    assert len(made.preempted) == priority
