"""When waiting jobs start: by limits, by the past, or not known."""

from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_scheduler.domain.estimates import Durations, soonest, starts, steady
from opentinker_scheduler.domain.floor import Capacity, Demand, Need
from opentinker_scheduler.domain.model import JobKind, Role, ServerOptions
from opentinker_scheduler.domain.prices import Prices
from opentinker_scheduler.domain.shares import Used

NOOP, TORCH = ServerOptions(engine="noop"), ServerOptions(engine="torch")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def server(name: str, *owners: str, options: ServerOptions = NOOP, exclusive: bool = False) -> Capacity:
    """A server with a slot for each owner; "" is free."""
    free = [slot for slot, owner in enumerate(owners) if not owner]
    taken = {slot: owner for slot, owner in enumerate(owners) if owner}
    return Capacity(
        name,
        Role.TRAINER,
        "m",
        options,
        free=free,
        jobs=set(taken.values()),
        taken=taken,
        exclusive=exclusive,
    )


def wants(job: str, slots: int = 1, options: ServerOptions = NOOP, exclusive: bool = False) -> Demand:
    return Demand(job, tuple(Need(0, i, Role.TRAINER, "m", options, exclusive) for i in range(slots)))


def test_each_waits_for_those_before_it() -> None:
    queue = [wants("first"), wants("second"), wants("third"), wants("fourth")]
    ends = {"a": 100.0, "b": 40.0}
    found = starts(queue, [server("s", "a", "b")], ends, lambda demand: 50.0)
    assert found == {"first": 40.0, "second": 90.0, "third": 100.0, "fourth": 140.0}


def test_who_needs_more_waits_for_enough() -> None:
    ends = {"a": 100.0, "b": 40.0, "c": 70.0}
    servers = [server("s", "a", "b"), server("t", "c")]
    assert starts([wants("large", 2), wants("next")], servers, ends, lambda _: 1000.0) == {
        "large": 70.0,
        "next": 100.0,
    }


def test_nothing_is_said_where_nobody_knows() -> None:
    # Of two slots one is known to get free: one job can be told, and then nobody knows any more.
    ends = {"a": None, "b": 40.0}
    queue = [wants("large", 2), wants("first"), wants("second")]
    assert starts(queue, [server("s", "a", "b")], ends, lambda _: None) == {"first": 40.0}
    # Whoever waits for a kind of server that is not there is told nothing, and takes nothing from others.
    queue = [wants("other", options=TORCH), wants("first")]
    assert starts(queue, [server("s", "b")], ends, lambda _: 9.0) == {"first": 40.0}


def test_slots_of_jobs_that_ended_are_as_good_as_free() -> None:
    queue = [wants("now"), wants("then")]
    assert starts(queue, [server("s", "gone", "a")], {"a": 7.0}, lambda _: 9.0) == {"then": 7.0}


def test_exclusive_jobs_keep_and_need_whole_servers() -> None:
    alone = server("s", "a", "", "", exclusive=True)
    assert starts([wants("one")], [alone], {"a": 30.0}, lambda _: 1.0) == {"one": 30.0}
    shared = server("s", "a", "b", "")
    queue = [wants("alone", exclusive=True), wants("after")]
    found = starts(queue, [shared], {"a": 30.0, "b": 60.0}, lambda _: 5.0)
    assert found == {"alone": 60.0, "after": 65.0}


@settings(max_examples=100, deadline=None)
@given(
    ends=st.lists(st.floats(1, 1000), min_size=1, max_size=6),
    needs=st.lists(st.tuples(st.integers(1, 6), st.floats(1, 500)), max_size=12),
)
def test_no_slot_is_promised_twice(ends: list[float], needs: list[tuple[int, float]]) -> None:
    """At no time do those that were told hold more slots than there are."""
    owners = [f"o{i}" for i in range(len(ends))]
    servers = [server(f"s{i}", owner) for i, owner in enumerate(owners)]
    queue = [wants(f"j{i}", slots) for i, (slots, _) in enumerate(needs)]
    takes = {f"j{i}": need for i, need in enumerate(needs)}
    found = starts(queue, servers, dict(zip(owners, ends, strict=True)), lambda d: takes[d.job_id][1])
    assert set(found) == {job for job, (slots, _) in takes.items() if slots <= len(ends)}
    for at in found.values():
        held = sum(end > at for end in ends)
        held += sum(takes[job][0] for job, start in found.items() if start <= at < start + takes[job][1])
        assert held <= len(ends)


def test_how_long_jobs_hold_slots_is_learned_by_kind() -> None:
    rl = [(JobKind.LORA_RL, seconds) for seconds in (50.0, 10.0, 20.0, 40.0, 30.0)]
    durations = Durations([*rl, (JobKind.SFT, 1.0)])
    assert durations.rest_s(JobKind.LORA_RL) == 30.0
    # Of those that went on for longer than 25 s: 30, 40, 50.
    assert durations.rest_s(JobKind.LORA_RL, 25.0) == 15.0
    assert durations.rest_s(JobKind.LORA_RL, 50.0) is None
    assert durations.rest_s(JobKind.SFT) is None
    assert soonest(None, 3.0, 2.0) == 2.0
    assert soonest(None, None) is None


def test_what_was_told_stays_while_it_is_about_right() -> None:
    hour = NOW + timedelta(hours=1)
    assert steady(None, hour, NOW) == hour
    assert steady(hour, hour + timedelta(minutes=5), NOW) == hour
    assert steady(hour, hour + timedelta(minutes=7), NOW) == hour + timedelta(minutes=7)
    assert steady(NOW, NOW + timedelta(seconds=3), NOW) == NOW + timedelta(seconds=3)


def test_prices() -> None:
    used = Used(slot_seconds=7200.0, gpu_seconds=1800.0)
    assert Prices().of(used) is None
    assert Prices(slot_hour=0.5).of(used) == 1.0
    assert Prices(0.5, 4.0).of(used) == 3.0
