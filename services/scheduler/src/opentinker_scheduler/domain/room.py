"""Idle servers that are stopped so that others can start, and servers that are started ahead of need."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from opentinker_scheduler.domain.floor import Capacity, Claim, Demand, Floor, Need, Obstacle, Shortage
from opentinker_scheduler.domain.limits import Key


def make_room(floor: Floor, demand: Demand, shortage: Shortage) -> None:
    """Mark idle servers to stop where a limit on servers, or want of GPUs, is what keeps a job waiting."""
    if not floor.limits.can_launch:
        return
    if shortage.obstacle.gpus:
        _free_gpus(floor, demand, shortage.need)
        return
    engine = shortage.obstacle.engine
    coming = Counter(floor.leaving)
    coming.subtract(name for name, _ in floor.claims)
    for name, count in coming.items():
        if count > 0 and engine in ("", name):
            # Room is being made; one more stop for each look would empty the cluster.
            floor.claims.append((name, ()))
            return
    for server in _by_use(floor.idle(), demand):
        if engine in ("", server.options.engine) and _is_spare(floor, server, demand):
            floor.evict(server)
            floor.claims.append((server.options.engine, ()))
            return


def warm_up(floor: Floor, lacking: Iterable[Key], shortages: Sequence[Shortage]) -> None:
    """Start servers that nobody waits for, where those who wait for room have no use for it."""
    for key in lacking:
        role, _, options = key
        takes_gpus = floor.limits.ask(role, options).total > 0
        if not any(_competes(one.obstacle, options.engine, takes_gpus) for one in shortages):
            floor.launch(Need(0, 0, *key), Demand("", ()))


def _competes(obstacle: Obstacle, engine: str, takes_gpus: bool) -> bool:
    return takes_gpus if obstacle.gpus else obstacle.engine in ("", engine)


def _free_gpus(floor: Floor, demand: Demand, need: Need) -> None:
    """Stop as few idle servers as make a job fit; none where it would not fit even without all of them."""
    order = [one for one in _by_use(floor.idle(), demand) if one.devices]
    if not floor.after((), order, floor.claims).has_gpus_for(need):
        return
    for number in range(len(order) + 1):
        stopped = order[:number]
        if (claims := _fits_without(floor, demand, stopped)) is not None:
            break
    else:
        return
    # The last one is needed; of those before it some may be of no use, as on another node.
    for one in stopped[-2::-1]:
        fewer = [other for other in stopped if other is not one]
        if (found := _fits_without(floor, demand, fewer)) is not None:
            stopped, claims = fewer, found
    for one in stopped:
        floor.evict(one)
    # Who comes next does not count on the same.
    floor.claims += claims


def _fits_without(floor: Floor, demand: Demand, stopped: Sequence[Capacity]) -> list[Claim] | None:
    """The new servers with which a job fits once some have stopped; None if it does not fit."""
    gone = {one.server_id for one in stopped}
    rest = [
        one.copy()
        for one in floor.servers
        if one.free and one.server_id not in gone and any(map(one.suits, demand.needs))
    ]
    later = floor.after(rest, stopped, floor.claims)
    if not isinstance(later.place(demand), tuple):
        return None
    return [(new.options.engine, new.devices) for new in later.launched]


def _by_use(idle: Iterable[Capacity], demand: Demand) -> list[Capacity]:
    """Those that are kept ready last, before them those of a kind that the job waits for itself."""
    return sorted(idle, key=lambda one: (one.warm, any(map(one.suits, demand.needs))))


def _is_spare(floor: Floor, server: Capacity, demand: Demand) -> bool:
    """Whether what a job could have on a server it can have on others that are there."""
    needs = tuple(need for need in demand.needs if server.suits(need))
    if not needs:
        return True
    others = [one.copy() for one in floor.free(server.kind) if one is not server]
    rest = Floor(others, replace(floor.limits, can_launch=False), {}, lambda: "")
    return isinstance(rest.place(replace(demand, needs=needs)), tuple)
