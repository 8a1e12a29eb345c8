"""Servers that are kept ready before anybody needs them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from opentinker_scheduler.domain import admission
from opentinker_scheduler.domain.admission import Offer
from opentinker_scheduler.domain.floor import NewServer
from opentinker_scheduler.domain.limits import Key
from opentinker_scheduler.domain.model import Role, Server, ServerState, SlotSpec
from opentinker_scheduler.ports import ModelSource, Transaction

_FIRST_WAIT_S, _LONGEST_WAIT_S = 5.0, 300.0
"""A kind whose servers die is waited with, each time twice as long."""


class WarmServers:
    """How many servers of each kind there are to be at least."""

    def __init__(self, wanted: Mapping[Key, int] | None = None) -> None:
        self._wanted = dict(wanted or {})
        self._seen: dict[str, Key] = {}
        """Servers of these kinds that had not ended."""
        self._losses: Counter[Key] = Counter()
        self._not_before: dict[Key, datetime] = {}

    def lacking(self, tx: Transaction, now: datetime) -> list[Key]:
        """What is to be started, as far as there is room for it."""
        if not self._wanted:
            return []
        servers = tx.servers.live()
        self._note_losses(tx, servers, now)
        return [
            key
            for key, surplus in self.surplus(servers).items()
            if now >= self._not_before.get(key, now)
            for _ in range(-surplus)
        ]

    def started(self, launches: Iterable[NewServer]) -> None:
        """These were started, for whomever."""
        for new in launches:
            if (key := (new.role, new.base_model, new.options)) in self._wanted:
                self._seen[new.server_id] = key

    def surplus(self, servers: Iterable[Server]) -> Counter[Key]:
        """Of each of these kinds, how many more there are than are to be kept."""
        if not self._wanted:
            return Counter()
        there = Counter(key_of(server) for server in servers if _stays(server))
        return Counter({key: there[key] - count for key, count in self._wanted.items()})

    def _note_losses(self, tx: Transaction, servers: Sequence[Server], now: datetime) -> None:
        live = {server.id: key_of(server) for server in servers if key_of(server) in self._wanted}
        for server_id in self._seen.keys() - live.keys():
            ended, key = tx.servers.find(server_id), self._seen[server_id]
            if ended is not None and ended.state is ServerState.LOST:
                wait_s = min(_FIRST_WAIT_S * 2 ** self._losses[key], _LONGEST_WAIT_S)
                self._losses[key] += 1
                self._not_before[key] = now + timedelta(seconds=wait_s)
        for server in servers:
            if server.state is ServerState.READY:
                self._losses.pop(key_of(server), None)
        self._seen = live


async def warm_servers(
    asked: Sequence[tuple[SlotSpec, int]], offer: Offer, models: ModelSource
) -> WarmServers:
    """So many servers for slots of these kinds, as a job that asks for such a slot would have them.
    ServiceError for what this cluster can never start."""
    wanted: dict[Key, int] = {}
    slots: list[SlotSpec] = []
    for index, (spec, count) in enumerate(asked):
        field = f"warm_servers[{index}]"
        admission.check_slot(spec, field)
        model = await models.resolve(spec.base_model, f"{field}.base_model")
        spec = admission.complete(spec, model, offer, field)
        key = (spec.role, spec.base_model, spec.options)
        wanted[key] = wanted.get(key, 0) + count
        # Replicas are on servers of their own, trainer slots fill them.
        each = 1 if spec.role is Role.INFERENCE else offer.limits.slots_of(spec.role, spec.options)
        slots.append(replace(spec, count=count * each))
    admission.check_capacity(slots, offer.limits, who="warm_servers", field="warm_servers")
    return WarmServers(wanted)


def key_of(server: Server) -> Key:
    return (server.role, server.base_model, server.options)


def _stays(server: Server) -> bool:
    return server.launched and server.state is not ServerState.DRAINING
