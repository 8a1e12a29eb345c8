"""Large jobs are not starved, small ones use the holes, and nothing lies idle without a reason."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from services.scheduler.tests.simulation import OPTIONS, Simulation

from opentinker_scheduler.domain.floor import Capacity, Demand, Need
from opentinker_scheduler.domain.limits import Limits
from opentinker_scheduler.domain.model import Role, ServerOptions
from opentinker_scheduler.domain.planner import Cluster, Plan, make_plan
from opentinker_scheduler.domain.reservations import Tenure
from opentinker_scheduler.domain.shares import Rules, Tenants


def test_a_large_job_starts_when_the_limits_of_others_say() -> None:
    """Small jobs keep coming; each could start at once, and together they would for ever."""
    it = Simulation({"a": 4, "b": 4})
    for _ in range(4):
        it.submit(1, lasts=10, limit_s=10)
        it.submit(1, lasts=10, limit_s=10)
        it.tick()
    large = it.submit(8, lasts=5, limit_s=5)
    begun = it.now
    for _ in range(30):
        it.submit(1, lasts=10, limit_s=10)
        it.tick()
    assert it.started[large] <= begun + 10


def test_without_reservations_it_would_wait_for_ever() -> None:
    """What the test above would find if nothing were kept."""
    it = Simulation({"a": 4, "b": 4}, reserve_after_s=1e9)
    for second in range(200):
        if second == 12:
            it.submit(8, lasts=5, limit_s=5, name="large")
        it.submit(1, lasts=10, limit_s=10)
        it.tick()
    assert "large" not in it.started


@pytest.mark.parametrize("patience", [0.0, 20.0])
def test_a_large_job_starts_among_jobs_without_limits(patience: float) -> None:
    it = Simulation({"a": 4, "b": 4}, reserve_after_s=patience)
    for second in range(120):
        if second == 20:
            it.submit(8, lasts=5, name="large")
        it.submit(1, lasts=10)
        it.tick()
    # A few are ahead of it; once slots are kept for it, those that hold them end within 10 s.
    assert it.started["large"] <= 20 + patience + 16
    # Until then the others went on.
    assert sum(start < 20 + patience for start in it.started.values()) >= 16 + patience / 2


def test_an_exclusive_job_gets_an_empty_server() -> None:
    it = Simulation({"a": 4, "b": 4})
    for second in range(60):
        if second == 20:
            it.submit(1, lasts=5, limit_s=5, name="alone", exclusive=True)
        it.submit(1, lasts=10, limit_s=10)
        it.tick()
    assert it.started["alone"] <= 36
    # Only one of the two servers was kept for it: on the other, jobs went on to start.
    assert sum(20 <= start < it.started["alone"] for start in it.started.values()) >= 4


def plan_beside(limit_s: float | None, slots: int = 1, exclusive: bool = False, waited: float = 0.0) -> Plan:
    """A server of 8 slots, 3 of them held for 100 s more; a job waits for 6 of them; another comes."""
    server = Capacity(
        "s",
        Role.TRAINER,
        "m",
        OPTIONS,
        free=[3, 4, 5, 6, 7],
        jobs={"old"},
        taken=dict.fromkeys(range(3), "old"),
    )
    needs = [Need(0, i, Role.TRAINER, "m", OPTIONS) for i in range(6)]
    small = tuple(Need(0, i, Role.TRAINER, "m", OPTIONS, exclusive) for i in range(slots))
    demands = [
        Demand("large", tuple(needs), since=-waited),
        Demand("small", small, since=1.0, limit_s=limit_s),
    ]
    ends_s = 100.0 if waited == 0 else None
    cluster = Cluster(
        Limits(can_launch=False, reserve_after_s=0.0), tenures=lambda: [Tenure("old", ends_s)], now=0.0
    )
    return make_plan(demands, [server], cluster, lambda: "none")


@pytest.mark.parametrize(
    ("limit_s", "slots", "starts"),
    [
        (100.0, 5, True),  # ends in time
        (101.0, 3, False),  # does not, and takes one of the six
        (101.0, 2, True),  # eight are two more than six
        (None, 2, True),
        (None, 3, False),
    ],
)
def test_small_jobs_run_in_the_holes(limit_s: float | None, slots: int, starts: bool) -> None:
    made = plan_beside(limit_s, slots)
    assert [grant.job_id for grant in made.grants] == (["small"] if starts else [])
    if not starts:
        told = {job: reason for job, _, reason in made.waiting()}
        assert "kept for a job" in told["small"]
        assert told["large"].startswith("waiting for 6 trainer slots of m on noop: ")
        assert told["large"].endswith("; slots are kept for it, enough within 2 min")


def test_who_needs_the_server_alone_does_not_take_it_from_under_a_reservation() -> None:
    assert not plan_beside(None, 1, exclusive=True).grants


@pytest.mark.parametrize(("limit_s", "starts"), [(30.0, True), (31.0, False), (None, False)])
def test_where_nobody_knows_the_end_a_wait_at_most_doubles(limit_s: float | None, starts: bool) -> None:
    made = plan_beside(limit_s, 3, waited=30.0)
    assert [grant.job_id for grant in made.grants] == (["small"] if starts else [])


def test_a_job_that_just_came_keeps_nobody_waiting() -> None:
    it = Simulation({"a": 4}, reserve_after_s=5.0)
    it.submit(1, lasts=100)
    it.tick()
    it.submit(4, lasts=1, name="large")
    it.submit(1, lasts=100, name="at once")
    it.tick(5.0)
    it.submit(1, lasts=100, name="later")
    it.tick()
    assert "at once" in it.started
    assert "later" not in it.started


OTHER = ServerOptions(engine="noop", dtype="bfloat16")


def test_a_job_of_another_kind_of_server_is_not_starved() -> None:
    """Both servers serve one kind, and jobs of it keep them busy; a job of another kind needs one to end."""

    def busy(name: str, job: str) -> Capacity:
        return Capacity(name, Role.TRAINER, "m", OPTIONS, free=[1], jobs={job}, taken={0: job})

    alien = Demand("alien", (Need(0, 0, Role.TRAINER, "m", OTHER),), since=-100.0)
    more = [Demand(f"more{i}", (Need(0, 0, Role.TRAINER, "m", OPTIONS),)) for i in range(2)]
    cluster = Cluster(
        Limits(max_servers=2, trainer_slots=2, reserve_after_s=60.0),
        {"noop": 2},
        tenures=lambda: [Tenure("early", 10.0), Tenure("late", 50.0)],
    )
    made = make_plan([alien, *more], [busy("s1", "early"), busy("s2", "late")], cluster, lambda: "new")
    # The server that empties first is left to empty; the other one goes on.
    assert [(grant.job_id, grant.placements[0].server_id) for grant in made.grants] == [("more0", "s2")]
    assert {job: position for job, position, _ in made.waiting()} == {"alien": 1, "more1": 2}


MIX = st.lists(
    st.tuples(
        st.integers(0, 40),  # when it comes
        st.integers(1, 8),  # slots
        st.integers(1, 15),  # how long it lasts
        st.integers(0, 10) | st.none(),  # how much longer its limit is
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=40, deadline=None)
@given(mix=MIX, patience=st.sampled_from([0.0, 5.0, 1e9]))
def test_every_job_is_served_and_the_first_in_line_when_it_was_promised(
    mix: list[tuple[int, int, int, int | None]], patience: float
) -> None:
    it = Simulation({"a": 8, "b": 3}, patience)
    promised: dict[str, float] = {}
    total = sum(lasts for _, _, lasts, _ in mix)
    for second in range(45 + total):
        for at, slots, lasts, slack in mix:
            if at == second:
                it.submit(slots, lasts, None if slack is None else lasts + slack)
        it.tick()
        positions = {job: position for job, position, _ in it.plan.waiting()}
        for one in it.plan.reservations:
            job = one.demand.job_id
            if one.ends_s is not None and positions[job] == 1:
                promised.setdefault(job, it.now - 1 + one.ends_s)
        if patience == 1e9:
            check_nothing_lies_idle(it)
        if len(it.started) == len(mix):
            break
    assert len(it.started) == len(mix)
    for job, time in promised.items():
        assert it.started[job] <= time + 1


def check_nothing_lies_idle(it: Simulation) -> None:
    """Whoever waits fits nowhere: slots of a trainer may be spread over servers."""
    free = it.free()
    for demand in it.queue:
        assert len(demand.needs) > free


@settings(max_examples=12, deadline=None)
@given(
    weights=st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=2, max_size=4),
    lasts=st.lists(st.integers(1, 6), min_size=4, max_size=4),
)
def test_busy_projects_hold_by_weight(weights: list[float], lasts: list[int]) -> None:
    """With always enough waiting, what each holds differs from its weighted share by no more than a slot
    for each other project, however long its jobs last."""
    names = [f"p{i}" for i in range(len(weights))]
    tenants = Tenants(by_project={n: Rules(weight=w) for n, w in zip(names, weights, strict=True)})
    it = Simulation({"a": 12, "b": 12}, 1e9, tenants)
    slot_seconds: Counter[str] = Counter()
    for second in range(60):
        for name, seconds in zip(names, lasts, strict=False):
            waiting = sum(one.project == name for one in it.queue)
            for _ in range(24 - waiting):
                it.submit(1, seconds, project=name)
        it.tick()
        if second >= 10:
            slot_seconds.update(one.demand.project for one in it.running.values())
    for name, weight in zip(names, weights, strict=True):
        entitled = 24 * weight / sum(weights)
        assert abs(slot_seconds[name] / 50 - entitled) <= len(names)
