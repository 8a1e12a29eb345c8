"""Placement where servers need GPUs: none is given twice, those who wait are told, idle servers make room."""

from collections import Counter
from copy import deepcopy
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_scheduler.domain.floor import Capacity, Demand, Need
from opentinker_scheduler.domain.limits import Limits
from opentinker_scheduler.domain.model import Role, ServerOptions
from opentinker_scheduler.domain.nodes import Node, node_of
from opentinker_scheduler.domain.planner import Cluster, Plan, make_plan
from opentinker_scheduler.domain.preemption import Candidate
from opentinker_scheduler.domain.reservations import Tenure

TORCH, VLLM, NOOP = ServerOptions("torch"), ServerOptions("vllm"), ServerOptions("noop")
GPUS = {"torch": 1, "vllm": 2}


def trainer(model: str = "m", **options: Any) -> Need:
    return Need(0, 0, Role.TRAINER, model, ServerOptions("torch", **options))


def sampler(model: str = "m") -> Need:
    return Need(1, 0, Role.INFERENCE, model, VLLM)


def idle(name: str, *devices: str, model: str = "old", **more: Any) -> Capacity:
    return Capacity(name, Role.TRAINER, model, TORCH, free=[0], devices=devices, **more)


def busy(name: str, job: str, *devices: str, model: str = "old") -> Capacity:
    return Capacity(name, Role.TRAINER, model, TORCH, free=[], jobs={job}, devices=devices, taken={0: job})


def plan(
    demands: list[Demand],
    servers: list[Capacity] | None = None,
    nodes: tuple[Node, ...] = (Node("a", 2), Node("b", 2)),
    leaving: tuple[str, ...] = (),
    tenures: list[Tenure] | None = None,
    **more: Any,
) -> Plan:
    """`leaving`: GPUs of torch servers that are being stopped."""
    there = servers or []
    limits = Limits(nodes=nodes, engine_gpus=GPUS, reserve_after_s=more.pop("reserve_after_s", 1e9))
    running = Counter([*(one.options.engine for one in there), *("torch" for _ in leaving)])
    cluster = Cluster(
        limits,
        running,
        Counter("torch" for _ in leaving),
        devices=frozenset([*(d for one in there for d in one.devices), *leaving]),
        coming=leaving,
        tenures=lambda: tenures or [],
        **more,
    )
    ids = count(1)
    return make_plan(demands, deepcopy(there), cluster, lambda: f"new{next(ids)}")


def told(made: Plan) -> dict[str, str]:
    return {job: reason for job, _, reason in made.waiting()}


def test_servers_get_gpus_of_their_own() -> None:
    made = plan([Demand("j", (trainer(), sampler()))])
    assert {new.options.engine: new.devices for new in made.launches} == {
        "torch": ("b/0",),
        "vllm": ("a/0", "a/1"),
    }


def test_what_takes_many_goes_first_and_what_takes_none_anywhere() -> None:
    needs = (trainer("m"), trainer("n"), sampler())
    made = plan([Demand("j", needs)])
    assert tuple(p.need for p in made.grants[0].placements) == needs
    assert [len({node_of(d) for d in new.devices}) for new in made.launches] == [1, 1, 1]
    made = plan([Demand("j", (Need(0, 0, Role.TRAINER, "m", NOOP),))], nodes=(Node("a", 0),))
    assert [new.devices for new in made.launches] == [()]


def test_who_waits_for_gpus_is_told_which() -> None:
    servers = [busy("s", "old", "a/0"), busy("t", "old", "b/0", "b/1")]
    made = plan([Demand("j", (sampler(),)), Demand("k", (trainer(accelerator="H100"),))], servers)
    assert told(made) == {
        "j": "waiting for 1 inference slot of m on vllm: 2 GPUs are free on no node",
        "k": "waiting for 1 trainer slot of m on torch: 1 GPU of type H100 is free on no node; 1 job ahead",
    }
    made = plan([Demand("j", (trainer(ranks=4),))], servers)
    assert told(made)["j"].endswith("1 GPU for each of 4 ranks are not free")


def test_a_type_is_kept_to() -> None:
    nodes = (Node("a", 1, "A100"), Node("h", 2, "H100"))
    made = plan([Demand("j", (trainer(accelerator="H100"),))], nodes=nodes)
    assert [new.devices for new in made.launches] == [("h/0",)]
    assert [new.options.accelerator for new in made.launches] == ["H100"]


def test_without_nodes_gpus_limit_nothing() -> None:
    made = plan([Demand("j", (trainer(ranks=64), sampler()))], nodes=())
    assert [new.devices for new in made.launches] == [(), ()]


def test_as_few_idle_servers_as_will_do_make_room_on_one_node() -> None:
    servers = [idle("s", "a/0"), idle("t", "b/0"), idle("u", "a/1"), busy("v", "x", "b/1")]
    made = plan([Demand("j", (sampler(),))], servers)
    assert sorted(made.evictions) == ["s", "u"]
    assert not made.grants
    # Two that would have to go together are one too many: it would wait all the same.
    made = plan([Demand("j", (sampler(), sampler("n")))], servers)
    assert made.evictions == []


def test_room_that_is_being_made_is_not_made_twice() -> None:
    servers = [idle("s", "b/0"), idle("t", "b/1")]
    made = plan([Demand("j", (sampler(),))], servers, leaving=("a/0", "a/1"))
    assert made.evictions == []
    # But what one waits for the next cannot have.
    made = plan([Demand("j", (sampler(),)), Demand("k", (sampler("n"),))], servers, leaving=("a/0", "a/1"))
    assert sorted(made.evictions) == ["s", "t"]


def test_a_server_that_is_kept_ready_makes_room_last() -> None:
    servers = [idle("s", "a/0", warm=True), idle("t", "b/0"), busy("u", "x", "a/1"), busy("v", "x", "b/1")]
    assert plan([Demand("j", (trainer(),))], servers).evictions == ["t"]
    assert plan([Demand("j", (trainer(),))], [servers[0], *servers[2:]], (Node("a", 2),)).evictions == ["s"]


WARM = (Role.TRAINER, "w", TORCH)


def test_servers_to_be_kept_ready_are_started_where_nobody_waits_for_their_room() -> None:
    made = plan([Demand("j", (trainer(),))], lacking=[WARM, WARM, WARM, WARM])
    assert Counter(new.base_model for new in made.launches) == {"m": 1, "w": 3}
    # The last GPU is not for it while a job waits for two, and is while one waits for something else.
    full = [busy("s", "x", "a/0", "a/1"), busy("t", "x", "b/0")]
    assert plan([Demand("j", (sampler(),))], full, lacking=[WARM]).launches == []
    assert [new.base_model for new in plan([], full, lacking=[WARM]).launches] == ["w"]
    assert plan([], [*full, busy("u", "x", "b/1")], lacking=[WARM]).launches == []


def test_gpus_are_kept_for_a_job_that_waits_for_more() -> None:
    servers = [busy("s", "old", "a/0")]
    large = Demand("large", (sampler(),), since=-100.0)
    small = Demand("small", (trainer(),), since=0.0)
    short = Demand("short", (trainer("n"),), since=1.0, limit_s=10.0)
    ends = [Tenure("old", 20.0)]
    made = plan([large, small, short], servers, (Node("a", 2),), tenures=ends, reserve_after_s=0.0)
    # The free GPU is for who ends before the other one is free.
    assert [grant.job_id for grant in made.grants] == ["short"]
    assert "slots are kept for it, enough within 1 min" in told(made)["large"]
    assert "kept for a job that waits for more" in told(made)["small"]
    # No server without GPUs stops for them.
    other = Capacity("cpu", Role.TRAINER, "old", NOOP, free=[0])
    made = plan([large, small], [*servers, other], (Node("a", 2),), tenures=ends, reserve_after_s=0.0)
    assert made.evictions == []
    # Once the old job has ended its server makes room, and the job gets both.
    made = plan([large, small], [idle("s", "a/0")], (Node("a", 2),), reserve_after_s=0.0)
    assert made.evictions == ["s"]
    assert not made.grants
    made = plan([large, small], [], (Node("a", 2),), leaving=("a/0",), reserve_after_s=0.0)
    assert not made.grants
    assert [grant.job_id for grant in plan([large, small], [], (Node("a", 2),)).grants] == ["large"]


def test_a_server_whose_gpu_is_waited_for_is_left_to_run_empty() -> None:
    shared = Capacity(
        "s", Role.TRAINER, "old", TORCH, free=[1], jobs={"old"}, devices=("a/0",), taken={0: "old"}
    )
    large = Demand("large", (sampler(),), since=-100.0)
    beside = Demand("beside", (trainer("old"),), since=0.0)
    ends = [Tenure("old", 20.0)]
    made = plan([large, beside], [shared], (Node("a", 2),), tenures=ends, reserve_after_s=0.0)
    assert not made.grants
    # Where another node has what it needs, or the server has none of it, it is not.
    made = plan([large, beside], [shared], tenures=ends, reserve_after_s=0.0)
    assert [grant.job_id for grant in made.grants] == ["large", "beside"]


def test_a_job_that_is_not_placed_takes_no_gpus_from_the_next() -> None:
    both, one = Demand("both", (sampler(), sampler("n"))), Demand("one", (sampler("o"),))
    made = plan([both, one], [busy("s", "x", "b/0")])
    assert [grant.job_id for grant in made.grants] == ["one"]


@pytest.mark.parametrize("reserve_after_s", [0.0, 1e9])
def test_jobs_give_way_for_gpus(reserve_after_s: float) -> None:
    servers = [busy("s", "x", "a/0"), busy("t", "y", "a/1"), busy("u", "z", "b/0"), busy("v", "z", "b/1")]
    candidates = [Candidate(job, 0, since) for job, since in (("x", 1.0), ("y", 3.0), ("z", 2.0))]
    ends = [Tenure(job) for job in "xyz"]
    more: dict[str, Any] = {
        "tenures": ends,
        "candidates": lambda: candidates,
        "reserve_after_s": reserve_after_s,
    }
    made = plan([Demand("urgent", (trainer(),), priority=1)], servers, **more)
    assert made.preempted == ["y"]
    # Two GPUs of one node: the one job that has two is enough.
    made = plan([Demand("urgent", (sampler(),), priority=1)], servers, **more)
    assert made.preempted == ["z"]
    # While an idle server makes room nobody else has to.
    made = plan([Demand("urgent", (trainer(),), priority=1)], [*servers[:3], idle("v", "b/1")], **more)
    assert (made.evictions, made.preempted) == (["v"], [])


KINDS = st.sampled_from([TORCH, VLLM, NOOP, ServerOptions("torch", ranks=2)])
NEEDS = st.lists(st.tuples(KINDS, st.sampled_from("mn")), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(NEEDS, max_size=8),
    gpus=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    data=st.data(),
)
def test_no_plan_gives_a_gpu_twice(
    asked: list[list[tuple[ServerOptions, str]]], gpus: list[int], data: st.DataObject
) -> None:
    nodes = tuple(Node(f"n{number}", number_of) for number, number_of in enumerate(gpus))
    there = [device for node in nodes for device in node.devices]
    used = data.draw(st.integers(0, len(there)))
    idlers = data.draw(st.integers(0, used))
    servers = [
        idle(f"s{at}", device) if at < idlers else busy(f"s{at}", f"old{at}", device)
        for at, device in enumerate(there[:used])
    ]
    demands = [
        Demand(
            f"j{job}", tuple(Need(at, 0, Role.TRAINER, model, kind) for at, (kind, model) in enumerate(needs))
        )
        for job, needs in enumerate(asked)
    ]
    made = plan(
        demands, servers, nodes, lacking=[WARM], reserve_after_s=data.draw(st.sampled_from([0.0, 1e9]))
    )
    given_now = [device for new in made.launches for device in new.devices]
    assert len(given_now) == len(set(given_now))
    assert set(given_now) <= set(there[used:])
    for new in made.launches:
        assert len(new.devices) == Limits(engine_gpus=GPUS).gpus_of(new.role, new.options)
    # Servers of jobs that were not placed are not started; only who is idle makes room.
    granted = {p.server_id for grant in made.grants for p in grant.placements}
    assert all(new.server_id in granted or new.base_model == "w" for new in made.launches)
    assert set(made.evictions) <= {f"s{at}" for at in range(idlers)}
    if made.evictions:
        waiting = [demand for demand in demands if demand.job_id in told(made)]
        assert waiting
