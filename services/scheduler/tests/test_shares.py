"""Who is next: by priority, by share and weight, by time; and what a project may not have."""

from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.domain.admission import check_limits, check_quota
from opentinker_scheduler.domain.floor import Demand
from opentinker_scheduler.domain.limits import Limits
from opentinker_scheduler.domain.model import Cost, JobKind, Role, ServerOptions, SlotSpec, Tuning
from opentinker_scheduler.domain.shares import (
    FairOrder,
    Rules,
    Shares,
    Tenants,
    cost_of,
    over_quota,
    positions,
)
from opentinkerapi.runtime.reasons import Reason

ONE = Cost(1.0)


def asks(job: str, project: str, cost: Cost = ONE, **more: object) -> Demand:
    return Demand(job, (), project=project, cost=cost, **more)  # type: ignore[arg-type]


def flood(project: str, number: int, cost: Cost = ONE) -> list[Demand]:
    return [asks(f"{project}{i}", project, cost, since=float(i)) for i in range(number)]


def serve(waiting: list[Demand], shares: Shares, number: int) -> list[str]:
    """The projects that get the next so many slots, if each job fits."""
    order = FairOrder(waiting, shares)
    got: list[str] = []
    for one in islice(order, number):
        order.grant(one.project, one.cost)
        got.append(one.project)
    return got


WEIGHTS = st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0]), min_size=2, max_size=6)


@settings(max_examples=100, deadline=None)
@given(weights=WEIGHTS, slots=st.integers(1, 60), held=st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_under_saturation_everyone_gets_by_weight(weights: list[float], slots: int, held: list[int]) -> None:
    """Nobody gets a slot while another, by weight, has less: the definition of a weighted fair share."""
    names = [f"p{i}" for i in range(len(weights))]
    tenants = Tenants(by_project={n: Rules(weight=w) for n, w in zip(names, weights, strict=True)})
    before = dict(zip(names, map(float, held), strict=False))
    shares = Shares(tenants, Cost(100.0), {name: Cost(number) for name, number in before.items()})
    waiting = [one for name in names for one in flood(name, 60)]
    got = Counter(serve(waiting, shares, slots))
    for name, weight in zip(names, weights, strict=True):
        if not got[name]:
            continue
        level = (before[name] + got[name] - 1) / weight
        for other, other_weight in zip(names, weights, strict=True):
            assert level <= (before[other] + got[other]) / other_weight + 1e-9


def test_a_flood_delays_only_itself() -> None:
    waiting = [*flood("loud", 10_000), asks("mine", "quiet", since=1e9)]
    assert "quiet" in serve(waiting, Shares(total=Cost(8.0)), 2)
    assert positions(waiting, Shares(total=Cost(8.0)))["mine"] == 2


def test_the_resource_counts_of_which_a_project_has_most() -> None:
    """Of 100 slots and 10 GPUs: one takes GPUs, the other slots; each ends with the same share of its own."""
    shares = Shares(total=Cost(100.0, 10.0))
    waiting = [*flood("gpus", 50, Cost(1.0, 1.0)), *flood("slots", 90)]
    got = Counter(serve(waiting, shares, 55))
    assert (got["gpus"], got["slots"]) == (5, 50)


def test_priorities_come_before_shares() -> None:
    rich = Shares(total=Cost(10.0), held={"rich": Cost(9.0)})
    waiting = [asks("poor", "poor"), asks("urgent", "rich", priority=1, since=9.0)]
    assert [one.job_id for one in FairOrder(waiting, rich)] == ["urgent", "poor"]


def test_in_a_project_time_decides() -> None:
    waiting = [asks("b", "p", since=2.0), asks("a", "p", since=1.0), asks("c", "p", since=2.0)]
    assert [one.job_id for one in FairOrder(waiting, Shares())] == ["a", "b", "c"]


JOBS = st.lists(
    st.tuples(st.sampled_from("pqr"), st.integers(0, 3), st.integers(-1, 1), st.integers(0, 5)), max_size=30
)


@settings(max_examples=100, deadline=None)
@given(jobs=JOBS)
def test_positions_number_everyone_once(jobs: list[tuple[str, int, int, int]]) -> None:
    waiting = [
        asks(f"j{i}", project, Cost(float(cost)), priority=priority, since=float(since))
        for i, (project, cost, priority, since) in enumerate(jobs)
    ]
    found = positions(waiting, Shares(total=Cost(5.0)))
    assert sorted(found.values()) == list(range(1, len(jobs) + 1))
    by_position = sorted(waiting, key=lambda one: found[one.job_id])
    assert [one.priority for one in by_position] == sorted((one.priority for one in waiting), reverse=True)
    for one, after in pairwise(by_position):
        if (one.project, one.priority) == (after.project, after.priority):
            assert one.since <= after.since


TORCH = ServerOptions(engine="torch", ranks=2)
TRAINER = SlotSpec(Role.TRAINER, "m", Tuning.LORA, 3, TORCH)
SAMPLER = SlotSpec(Role.INFERENCE, "m", count=2, options=ServerOptions(engine="vllm"))


def cost(*slots: SlotSpec) -> Cost:
    limits = Limits(trainer_slots=8, inference_slots=4, engine_gpus={"torch": 1, "vllm": 2})
    return cost_of(slots, limits.per_server)


def test_what_a_job_costs() -> None:
    assert cost(TRAINER) == Cost(3.0, 3 * 2 / 8)
    assert cost(TRAINER, SAMPLER) == Cost(5.0, 0.75 + 2 * 2 / 4)
    alone = SlotSpec(Role.TRAINER, "m", Tuning.FULL, 9, TORCH, exclusive=True)
    assert cost(alone) == Cost(16.0, 4.0)
    replicas = SlotSpec(Role.INFERENCE, "m", count=2, options=ServerOptions(engine="vllm"), exclusive=True)
    assert cost(replicas) == Cost(8.0, 4.0)


def test_a_quota_is_named() -> None:
    rules = Rules(max_slots=4, max_gpus=1.5, max_gpu_seconds_a_day=100.0)
    shares = Shares(Tenants(rules), gpu_seconds={"p": 100.0})
    assert "3 of its quota max_slots=4" in over_quota("p", Cost(2.0), shares, Cost(3.0))
    assert "1 of its quota max_gpus=1.5" in over_quota("p", Cost(1.0, 1.0), shares, Cost(1.0, 1.0))
    assert "100 of its quota max_gpu_seconds_a_day=100" in over_quota("p", Cost(1.0, 0.5), shares, Cost())
    # What takes no GPU is not stopped by a quota on them.
    assert over_quota("p", Cost(1.0), shares, Cost(3.0)) == ""
    assert over_quota("q", Cost(1.0, 0.5), shares, Cost()) == ""


def test_a_quota_on_tokens_is_for_jobs_of_any_cost() -> None:
    tenants = Tenants(Rules(max_tokens_a_day=1000), {"free": Rules()})
    shares = Shares(tenants, tokens={"p": 1000, "q": 999, "free": 10**12})
    says = "project p used 1000 tokens of its quota max_tokens_a_day=1000"
    assert says in over_quota("p", Cost(1.0), shares, Cost())
    assert over_quota("q", Cost(1.0), shares, Cost()) == over_quota("free", Cost(1.0), shares, Cost()) == ""
    assert tenants.meters_tokens
    assert not tenants.meters_gpus


@pytest.mark.parametrize(
    ("cost", "priority", "jobs", "field", "says"),
    [
        (Cost(5.0), 0, 0, "job.slots", "max_slots of project p is 4"),
        (Cost(1.0, 2.0), 0, 0, "job.slots", "max_gpus of project p is 1.5"),
        (Cost(1.0), 1, 0, "job.priority", "max_priority of project p is 0"),
        (Cost(1.0), 0, 7, "job", "max_jobs is 7"),
    ],
)
def test_what_a_project_can_never_have_is_refused(
    cost: Cost, priority: int, jobs: int, field: str, says: str
) -> None:
    rules = Rules(max_slots=4, max_gpus=1.5, max_jobs=7)
    check_quota("p", Cost(4.0, 1.5), 0, 6, rules)
    check_quota("p", Cost(1.0), -100, 6, rules)
    with pytest.raises(ServiceError) as refused:
        check_quota("p", cost, priority, jobs, rules)
    assert (refused.value.reason, refused.value.field) == (Reason.QUOTA_EXCEEDED, field)
    assert says in refused.value.message
    assert refused.value.quota


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ((101, 0.0, 0.0), "job.priority"),
        ((-101, 0.0, 0.0), "job.priority"),
        ((0, 0.5, 0.0), "job.max_duration"),
        ((0, 1e9, 0.0), "job.max_duration"),
        ((0, 0.0, 9.0), "job.idle_limit"),
        ((0, 0.0, 1e12), "job.idle_limit"),
    ],
)
def test_absurd_limits_are_refused(limits: tuple[int, float, float], field: str) -> None:
    check_limits(JobKind.SFT, 100, 1.0, 10.0)
    with pytest.raises(ServiceError) as refused:
        check_limits(JobKind.SFT, *limits)
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_FIELD, field)


def test_what_only_samples_has_no_idle_limit() -> None:
    with pytest.raises(ServiceError) as refused:
        check_limits(JobKind.INFERENCE, 0, 0.0, 60.0)
    assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED_OPTION, "job.idle_limit")
