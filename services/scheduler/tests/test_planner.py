"""Placement: whatever is asked of whatever floor, no slot is given twice, no job gets half of its slots."""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from opentinker_scheduler.domain.floor import Capacity, Demand, Need
from opentinker_scheduler.domain.limits import Limits
from opentinker_scheduler.domain.model import Role, ServerOptions
from opentinker_scheduler.domain.planner import Cluster, Grant, Plan, make_plan

A, B = ServerOptions(engine="noop"), ServerOptions(engine="noop", serving_mode="merged")
TORCH = ServerOptions(engine="torch")


def needs(number: int, options: ServerOptions = A, exclusive: bool = False, model: str = "m") -> list[Need]:
    return [Need(0, i, Role.TRAINER, model, options, exclusive) for i in range(number)]


def demand(job: str, number: int, queued: bool = True, **kind: object) -> Demand:
    return Demand(job, tuple(needs(number, **kind)), queued)  # type: ignore[arg-type]


def plan(
    demands: Sequence[Demand],
    servers: Sequence[Capacity] = (),
    running: dict[str, int] | None = None,
    leaving: dict[str, int] | None = None,
    **limits: object,
) -> Plan:
    ids = count(1)
    cluster = Cluster(Limits(**limits), running or {}, leaving or {})  # type: ignore[arg-type]
    return make_plan(demands, deepcopy(list(servers)), cluster, lambda: f"new{next(ids)}")


def told(made: Plan) -> dict[str, tuple[int, str]]:
    """Position and reason of those who wait."""
    return {job: (position, reason) for job, position, reason in made.waiting()}


def server(name: str, free: int, options: ServerOptions = A, **more: object) -> Capacity:
    return Capacity(name, Role.TRAINER, "m", options, list(range(free)), **more)  # type: ignore[arg-type]


def test_an_empty_cluster_starts_servers() -> None:
    made = plan([demand("j", 10)], trainer_slots=8)
    assert [new.slots for new in made.launches] == [8, 8]
    assert Counter(p.server_id for p in made.grants[0].placements) == {"new1": 8, "new2": 2}


def test_jobs_share_a_server_that_is_not_ready_yet() -> None:
    made = plan([demand(f"j{i}", 1) for i in range(3)])
    assert len(made.launches) == 1
    assert len(made.grants) == 3


def test_a_large_job_does_not_block_a_small_one() -> None:
    """B98: strict order would let the 8-slot job hold up everyone behind it."""
    made = plan([demand("large", 8), demand("small", 1)], [server("s", 4)], {"noop": 1}, max_servers=1)
    assert [grant.job_id for grant in made.grants] == ["small"]
    assert told(made)["large"][0] == 1
    assert "waiting for 8 trainer slots" in told(made)["large"][1]
    assert "max_servers=1 is reached" in told(made)["large"][1]


def test_who_waits_is_told_how_many_are_ahead() -> None:
    made = plan([demand("a", 2), demand("b", 2), demand("c", 2)], can_launch=False)
    assert [told(made)[job][0] for job in "abc"] == [1, 2, 3]
    assert told(made)["c"][1].endswith("2 jobs ahead")
    assert told(made)["b"][1].endswith("1 job ahead")


def test_jobs_that_lost_slots_go_first() -> None:
    made = plan([demand("new", 1), demand("crashed", 1, queued=False)], [server("s", 1)], can_launch=False)
    assert [grant.job_id for grant in made.grants] == ["crashed"]


def test_at_most_so_many_grants_a_tick() -> None:
    made = plan([demand(f"j{i}", 1) for i in range(9)], [server("s", 20)], max_grants=4)
    assert len(made.grants) == 4
    assert len(told(made)) == 5


def test_exclusive_slots_share_with_nobody() -> None:
    made = plan([demand("j", 1, exclusive=True)], [server("s", 5, jobs={"other"})])
    assert [new.server_id for new in made.launches] == ["new1"]
    made = plan([demand("j", 1)], [server("s", 5, jobs={"other"}, exclusive=True)])
    assert [new.server_id for new in made.launches] == ["new1"]
    made = plan([demand("j", 2, exclusive=True)], [server("s", 5)])
    assert not made.launches


def test_a_limit_by_engine_holds() -> None:
    made = plan([demand("j", 9, options=TORCH)], max_engine_servers={"torch": 1}, trainer_slots=8)
    assert not made.grants
    assert not made.launches
    assert "max_engine_servers[torch]=1 is reached" in told(made)["j"][1]


def test_an_idle_server_makes_room() -> None:
    idle = server("idle", 8, TORCH)
    made = plan([demand("j", 1)], [idle], {"torch": 1}, max_servers=1)
    assert made.evictions == ["idle"]
    assert "j" in told(made)


def test_an_idle_server_of_a_kind_that_is_wanted_makes_room_where_others_are_enough() -> None:
    wanted = Demand("j", (*needs(2), Need(1, 0, Role.TRAINER, "m", TORCH)))
    three = [server(name, 2) for name in ("a", "b", "c")]
    assert len(plan([wanted], three, {"noop": 3}, max_servers=3).evictions) == 1
    # Here each is needed.
    two = [server(name, 1) for name in ("a", "b")]
    assert plan([wanted], two, {"noop": 2}, max_servers=2).evictions == []


def test_no_more_idle_servers_are_stopped_than_make_room() -> None:
    idle = [server(f"idle{i}", 8, TORCH) for i in range(3)]
    made = plan([demand("j", 1)], idle, {"torch": 4}, {"torch": 1}, max_servers=4)
    assert made.evictions == []
    assert "j" in told(made)


def test_a_busy_server_is_not_evicted() -> None:
    made = plan([demand("j", 1)], [server("s", 7, TORCH, jobs={"x"})], {"torch": 1}, max_servers=1)
    assert not made.evictions


def test_servers_that_registered_themselves_serve_what_they_accept() -> None:
    big = server("s", 2, ServerOptions("torch", "float32", "", 64, 4096), launched=False)
    asked = ServerOptions(max_lora_rank=32)
    assert plan([demand("j", 1, options=asked)], [big], can_launch=False).grants
    asked = ServerOptions(max_lora_rank=128)
    assert not plan([demand("j", 1, options=asked)], [big], can_launch=False).grants


def replicas(*ordinals: int, slot_index: int = 0) -> tuple[Need, ...]:
    return tuple(Need(slot_index, ordinal, Role.INFERENCE, "m", A) for ordinal in ordinals)


def inference(name: str, free: int, **more: object) -> Capacity:
    return Capacity(name, Role.INFERENCE, "m", A, list(range(free)), **more)  # type: ignore[arg-type]


def test_replicas_never_share_a_server() -> None:
    made = plan([Demand("j", replicas(0, 1, 2))], [inference("s", 8)])
    assert len({p.server_id for p in made.grants[0].placements}) == 3
    assert len(made.launches) == 2
    # Slots of another job, and other slots of the same one, may lie beside them.
    beside = [Demand("k", replicas(0)), Demand("l", (*replicas(0), *replicas(0, slot_index=1)))]
    assert not plan(beside, [inference("s", 8)]).launches


def test_a_replaced_replica_goes_where_none_of_its_job_is() -> None:
    floor = [
        inference("has one", 7, jobs={"j"}, replicas={("j", 0)}),
        inference("has none", 8, jobs={"k"}, replicas={("k", 0)}),
    ]
    made = plan([Demand("j", replicas(1), queued=False)], floor, can_launch=False)
    assert [p.server_id for p in made.grants[0].placements] == ["has none"]
    made = plan([Demand("j", replicas(1), queued=False)], floor[:1], can_launch=False)
    assert not made.grants


def test_who_waits_for_replicas_is_told_that_each_needs_a_server() -> None:
    made = plan([Demand("j", replicas(0, 1))], [inference("s", 8)], can_launch=False)
    assert "2 inference slots of m on noop, each on a server of its own" in told(made)["j"][1]


def test_what_a_job_cannot_go_on_without_is_not_held_up_by_a_spare_replica() -> None:
    needed, spare = Demand("j", tuple(needs(1)), queued=False), Demand("j", replicas(1), queued=False)
    made = plan([needed, spare], [server("s", 1)], can_launch=False)
    assert [p.need for grant in made.grants for p in grant.placements] == list(needed.needs)
    assert "waiting for 1 inference slot" in told(made)["j"][1]


OPTIONS = st.sampled_from([A, B, TORCH])
DEMANDS = st.lists(
    st.tuples(st.integers(1, 12), OPTIONS, st.booleans(), st.booleans(), st.sampled_from(["m", "n"])),
    max_size=12,
)
SERVERS = st.lists(st.tuples(st.integers(0, 8), OPTIONS, st.booleans()), max_size=6)


@settings(max_examples=150, deadline=None)
@given(asked=DEMANDS, there=SERVERS, max_servers=st.integers(1, 8), max_grants=st.integers(1, 5))
def test_every_plan_keeps_the_rules(
    asked: list[tuple[int, ServerOptions, bool, bool, str]],
    there: list[tuple[int, ServerOptions, bool]],
    max_servers: int,
    max_grants: int,
) -> None:
    demands = [
        Demand(f"j{i}", tuple(needs(number, options, exclusive, model)), queued)
        for i, (number, options, exclusive, queued, model) in enumerate(asked)
    ]
    servers = [
        server(f"s{i}", free, options, jobs={"old"} if busy else set())
        for i, (free, options, busy) in enumerate(there)
    ]
    running = dict(Counter(item.options.engine for item in servers))
    made = plan(demands, servers, running, max_servers=max_servers, max_grants=max_grants)
    by_job = {item.job_id: item for item in demands}
    check_plan(made, by_job, {item.server_id: item for item in servers})
    assert {grant.job_id for grant in made.grants}.isdisjoint(told(made))
    assert {*(grant.job_id for grant in made.grants), *told(made)} == set(by_job)
    assert len(made.grants) <= max_grants
    assert len(servers) + len(made.launches) <= max(max_servers, len(servers))


def check_plan(made: Plan, demands: dict[str, Demand], servers: dict[str, Capacity]) -> None:
    """No slot twice, all or none, only free slots of servers that fit, nobody beside an exclusive slot."""
    given = [(p.server_id, p.slot_no) for grant in made.grants for p in grant.placements]
    assert len(given) == len(set(given))
    tenants: dict[str, set[str]] = {name: set(item.jobs) for name, item in servers.items()}
    exclusive = {name for name, item in servers.items() if item.exclusive}
    launched = {new.server_id: new for new in made.launches}
    for grant in made.grants:
        assert tuple(p.need for p in grant.placements) == demands[grant.job_id].needs
        for p in grant.placements:
            if p.server_id in servers:
                assert p.slot_no in servers[p.server_id].free
                assert servers[p.server_id].options == p.need.options
            else:
                assert p.slot_no < launched[p.server_id].slots
                assert launched[p.server_id].options == p.need.options
            tenants.setdefault(p.server_id, set()).add(grant.job_id)
            if p.need.exclusive:
                exclusive.add(p.server_id)
    for name in exclusive:
        assert len(tenants[name]) == 1
    assert not set(made.evictions) & {server_id for server_id, _ in given}


class FloorMachine(RuleBasedStateMachine):
    """A cluster over time: jobs come, end and crash, servers die. Every slot always has at most one owner."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = count()
        self.queue: dict[str, Demand] = {}
        self.held: dict[str, Grant] = {}
        self.servers: dict[str, int] = {}
        self.limits = Limits(max_servers=3, trainer_slots=4)

    @rule(number=st.integers(1, 8))
    def create(self, number: int) -> None:
        job = f"j{next(self.ids)}"
        self.queue[job] = demand(job, number)

    @rule()
    def tick(self) -> None:
        capacities = [server(name, 0, jobs=self._jobs_on(name)) for name in self.servers]
        for capacity in capacities:
            used = self._used(capacity.server_id)
            capacity.free = [slot for slot in range(self.servers[capacity.server_id]) if slot not in used]
        cluster = Cluster(self.limits, {"noop": len(self.servers)})
        made = make_plan(self.queue.values(), deepcopy(capacities), cluster, lambda: f"s{next(self.ids)}")
        check_plan(made, self.queue, {item.server_id: item for item in capacities})
        self.servers |= {new.server_id: new.slots for new in made.launches}
        for grant in made.grants:
            earlier = self.held.get(grant.job_id)
            kept = earlier.placements if earlier is not None else ()
            self.held[grant.job_id] = Grant(grant.job_id, (*kept, *grant.placements))
            del self.queue[grant.job_id]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end_job(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[job]
        self.queue.pop(job, None)

    @precondition(lambda self: self.servers)
    @rule(data=st.data())
    def lose_server(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.servers)))
        del self.servers[name]
        for job, grant in list(self.held.items()):
            lost = tuple(p.need for p in grant.placements if p.server_id == name)
            if lost:
                kept = tuple(p for p in grant.placements if p.server_id != name)
                self.held[job] = Grant(job, kept)
                waiting = self.queue.get(job)
                self.queue[job] = Demand(job, (*(waiting.needs if waiting else ()), *lost), queued=False)

    def _jobs_on(self, name: str) -> set[str]:
        return {job for job, grant in self.held.items() for p in grant.placements if p.server_id == name}

    def _used(self, name: str) -> set[int]:
        return {p.slot_no for g in self.held.values() for p in g.placements if p.server_id == name}

    @invariant()
    def one_owner(self) -> None:
        slots = [(p.server_id, p.slot_no) for grant in self.held.values() for p in grant.placements]
        assert len(slots) == len(set(slots))
        assert all(server_id in self.servers for server_id, _ in slots)
        assert len(self.servers) <= self.limits.max_servers

    @invariant()
    def nothing_lost(self) -> None:
        """What a job holds and what it waits for is all that it asked for."""
        for job, grant in self.held.items():
            waiting = self.queue[job].needs if job in self.queue else ()
            places = [need.ordinal for need in (*(p.need for p in grant.placements), *waiting)]
            assert sorted(places) == list(range(len(places)))


TestFloor = FloorMachine.TestCase
TestFloor.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("seed", range(3))
def test_a_queue_that_can_be_served_is_served(seed: int) -> None:
    """Nobody waits for ever: with every tick of endings the queue gets shorter."""
    queue = {f"j{i}": demand(f"j{i}", 1 + (i * (seed + 3)) % 8) for i in range(20)}
    for _ in range(20):
        if not queue:
            return
        made = plan(list(queue.values()), max_servers=1, trainer_slots=8)
        assert made.grants
        for grant in made.grants:
            del queue[grant.job_id]
    raise AssertionError(f"{len(queue)} jobs were never placed")
