"""The GPUs of the nodes, and which of them a new server gets.

The GPUs of a rank are on one node. The ranks of a server are together on one node where they fit, else on
as few as possible, all of one accelerator. Of the nodes that have enough the one with the least room is
taken, so that large holes stay.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A machine that servers are started on."""

    name: str
    gpus: int
    accelerator: str = ""
    """Type of its GPUs, as in "H100"."""
    ids: tuple[str, ...] = ()
    """What they are called there; by default they are numbered."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Its GPUs by names that no other node has."""
        return tuple(f"{self.name}/{each}" for each in self.ids or range(self.gpus))


@dataclass(frozen=True, slots=True)
class Ask:
    """The GPUs that a server needs."""

    ranks: int
    gpus: int
    """Of each rank."""
    accelerator: str = ""
    """Their type; empty: any."""

    @property
    def total(self) -> int:
        return self.ranks * self.gpus

    def describe(self) -> str:
        """As in "2 GPUs of type H100 for each of 4 ranks"."""
        of_type = f" of type {self.accelerator}" if self.accelerator else ""
        gpus = f"{self.gpus} {'GPU' if self.gpus == 1 else 'GPUs'}{of_type}"
        return gpus if self.ranks == 1 else f"{gpus} for each of {self.ranks} ranks"


class Pool:
    """The GPUs that no server has."""

    def __init__(self, nodes: Iterable[Node], taken: Collection[str] = ()) -> None:
        gone = frozenset(taken)
        self._nodes = tuple(nodes)
        self._known = frozenset(device for node in self._nodes for device in node.devices)
        self._free = {
            node.name: [device for device in node.devices if device not in gone] for node in self._nodes
        }

    def copy(self) -> "Pool":
        copied = Pool(())
        copied._nodes, copied._known = self._nodes, self._known
        copied._free = {name: list(devices) for name, devices in self._free.items()}
        return copied

    def find(self, ask: Ask, kept: Collection[str] = ()) -> tuple[str, ...] | None:
        """Free GPUs for a server, rank by rank, none of the `kept` ones; None where there are not enough."""
        if ask.total == 0:
            return ()
        by_type: dict[str, list[list[str]]] = {}
        for node in self._nodes:
            if ask.accelerator in ("", node.accelerator):
                free = self._free[node.name]
                room = [one for one in free if one not in kept] if kept else free
                by_type.setdefault(node.accelerator, []).append(room)
        found = [chosen for rooms in by_type.values() if (chosen := _choose(ask, rooms)) is not None]
        if not found:
            return None
        rooms = min(found, key=lambda chosen: (len(chosen), sum(map(len, chosen))))
        return _spread(ask, rooms)

    def take(self, devices: Iterable[str]) -> None:
        for device in devices:
            free = self._free.get(node_of(device), [])
            if device in free:
                free.remove(device)

    def give_back(self, devices: Iterable[str]) -> None:
        """These are free too. What the nodes do not have any more is not."""
        for device in devices:
            if device in self._known and device not in (free := self._free[node_of(device)]):
                free.append(device)


def node_of(device: str) -> str:
    """The node that a GPU is on."""
    return device.partition("/")[0]


def id_of(device: str) -> str:
    """What a GPU is called on its node."""
    return device.partition("/")[2]


def accelerators(nodes: Iterable[Node]) -> Sequence[str]:
    """The types that there are, as far as they are known."""
    return sorted({node.accelerator for node in nodes if node.accelerator})


def _choose(ask: Ask, rooms: Sequence[list[str]]) -> list[list[str]] | None:
    """The fewest nodes that hold all ranks, by their free GPUs."""
    ranks, chosen = ask.ranks, []
    left = sorted((room for room in rooms if len(room) >= ask.gpus), key=len)
    while ranks > 0:
        if not left:
            return None
        enough = next((at for at, room in enumerate(left) if len(room) // ask.gpus >= ranks), len(left) - 1)
        room = left.pop(enough)
        chosen.append(room)
        ranks -= len(room) // ask.gpus
    return chosen


def _spread(ask: Ask, rooms: Sequence[Sequence[str]]) -> tuple[str, ...]:
    devices: list[str] = []
    for room in rooms:
        missing = ask.total - len(devices)
        devices += room[: min(missing, len(room) // ask.gpus * ask.gpus)]
    return tuple(devices)
