"""How far sampling runs ahead: the formula after a resume, and its bound under random delays."""

import random

import pytest
from client.tests.training.golden import CASES

from opentinker import errors
from opentinker.training.staleness import StalenessBuffer, StalenessGate, capacity


def test_capacity() -> None:
    """S1; B81: after a resume `accepted` is what it was."""
    at_start, running, forgotten, restored = CASES["S1"]["out"]
    common = {"max_concurrent": 64, "max_staleness": 2, "batch": 4}
    assert capacity(**common, version=0, accepted=0, running=0) == at_start
    assert capacity(**common, version=3, accepted=12, running=8) == running
    assert capacity(**common, version=10, accepted=0, running=0) == forgotten

    gate = StalenessGate(**common)
    for version in range(10):
        while gate.capacity and gate.accepted < 4 * (version + 1):
            gate.start()
            gate.end(accepted=1)
        gate.advance(version + 1)
    gate.start(5)  # under way when the run dies
    resumed = StalenessGate(**common, **gate.state())
    assert (resumed.version, resumed.accepted, resumed.running) == (10, 40, 0)
    assert resumed.capacity == restored != forgotten


def test_what_is_not_used_takes_no_room() -> None:
    """B47: dropped groups must not eat the capacity until nothing starts any more."""
    gate = StalenessGate(max_concurrent=8, max_staleness=0, batch=2)
    for _ in range(100):
        gate.start(gate.capacity)
        gate.end(rejected=gate.running)
    assert gate.capacity == 2
    gate.start(2)
    gate.end(accepted=2)
    assert gate.capacity == 0
    gate.give_back(1)
    assert gate.capacity == 1


def test_counts_that_cannot_be_are_refused() -> None:
    gate = StalenessGate(max_concurrent=2, max_staleness=1, batch=1, version=3, accepted=4)
    for call, name in (
        (lambda: gate.start(3), "count"),
        (lambda: gate.end(accepted=1), "accepted"),
        (lambda: gate.give_back(5), "count"),
        (lambda: gate.advance(2), "version"),
        (lambda: StalenessGate(max_concurrent=0, max_staleness=0, batch=1), "max_concurrent"),
        (lambda: StalenessBuffer(-1), "max_staleness"),
    ):
        with pytest.raises(errors.InvalidArgument, match=name):
            call()


def test_oldest_first_and_nothing_lost() -> None:
    buffer: StalenessBuffer[str] = StalenessBuffer(max_staleness=1)
    for name, version, ordinal in (("c", 1, 2), ("b", 0, 1), ("d", 1, 3), ("a", 0, 0)):
        buffer.put(name, version=version, ordinal=ordinal)
    assert buffer.take(5, version=1) is None
    assert buffer.take(3, version=1) == ["a", "b", "c"]
    buffer.put("e", version=0, ordinal=4)
    assert buffer.take(2, version=2) is None  # e is too old to be taken
    assert buffer.drop_stale(version=2) == ["e"]
    assert buffer.take(1, version=2) == ["d"]
    assert buffer.counts == {"put": 5, "taken": 4, "dropped": 1, "waiting": 0}


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("delays", ["even", "wild"])
def test_no_token_is_older_than_the_bound(bound: int, delays: str) -> None:
    """B90: 200 steps of a simulated loop; all that is started is trained on, waits, runs or is counted."""
    generator = random.Random(bound)
    batch = 4
    gate = StalenessGate(max_concurrent=64, max_staleness=bound, batch=batch)
    buffer: StalenessBuffer[tuple[int, int]] = StalenessBuffer(bound)
    running: list[tuple[float, int, int]] = []
    now, started, trained, oldest = 0.0, 0, 0, 0
    while trained < 200:
        while gate.capacity:
            gate.start()
            delay = 1.0 if delays == "even" else generator.expovariate(1.0) ** 3
            running.append((now + delay, started, gate.version))
            started += 1
        stale = buffer.drop_stale(gate.version)
        gate.give_back(len(stale))
        taken = buffer.take(batch, gate.version)
        if taken is not None:
            oldest = max(oldest, *(gate.version - version for version, _ in taken))
            trained += 1
            gate.advance(gate.version + 1)
            continue
        if stale:
            continue
        running.sort()
        now, ordinal, version = running.pop(0)
        gate.end(accepted=1)
        buffer.put((version, ordinal), version=version, ordinal=ordinal)
    counts = buffer.counts
    assert oldest <= bound
    assert oldest == bound or delays == "even"  # the bound is used
    assert started == len(running) + counts["taken"] + counts["dropped"] + counts["waiting"]
    assert counts["taken"] == 200 * batch
    if delays == "even":
        assert counts["dropped"] == 0
