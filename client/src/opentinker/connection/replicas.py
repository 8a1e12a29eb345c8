"""Which of a job's servers a request goes to, where several do the same.

The requests of a conversation go where its earlier ones went: that server has what was said so far in its
prefix cache. Everything else goes to the server with the least in flight from here. A server that did not
answer is passed over while another is left, until it answers again or is replaced.
"""

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

MAX_CONVERSATIONS = 16_384
"""How many conversations are remembered; the one that was quiet longest is forgotten first."""


class Reachable(Protocol):
    """The way to a server. Address and attempt name the server as long as it lives."""

    @property
    def address(self) -> str: ...
    @property
    def attempt(self) -> int: ...


L = TypeVar("L", bound=Reachable)
_Name = tuple[str, int]


@dataclass(slots=True)
class _Replica(Generic[L]):
    link: L
    in_flight: int = 0
    """Completions that were asked for and have not come."""
    suspect: bool = False
    """It did not answer last."""
    picked: int = 0
    """When it was last picked, in picks."""


class Replicas(Generic[L]):
    """The servers of one role. Knows nothing of channels and calls."""

    def __init__(self) -> None:
        self._replicas: dict[_Name, _Replica[L]] = {}
        self._homes: OrderedDict[str, _Name] = OrderedDict()
        self._picks = itertools.count(1)

    def adopt(self, links: Sequence[L]) -> None:
        """Take in where the servers are now. What is known of those that stay is kept."""
        known, self._replicas = self._replicas, {}
        for link in links:
            replica = known.get(_name(link)) or _Replica(link)
            replica.link = link
            self._replicas[_name(link)] = replica

    def pick(self, conversation: str = "") -> L:
        """The server for a request; there must be one. Remembers where the conversation is."""
        among = self._answering()
        home = self._homes.get(conversation) if conversation else None
        chosen = next((each for each in among if _name(each.link) == home), None)
        if chosen is None:
            chosen = min(among, key=lambda each: (each.in_flight, each.picked))
        chosen.picked = next(self._picks)
        if conversation:
            self._homes[conversation] = _name(chosen.link)
            self._homes.move_to_end(conversation)
            if len(self._homes) > MAX_CONVERSATIONS:
                self._homes.popitem(last=False)
        return chosen.link

    @contextlib.contextmanager
    def using(self, link: L, weight: int = 1) -> Iterator[None]:
        """Count so many completions as in flight there while the block runs."""
        # Found once: its successor of the same name is another one.
        replica = self._replicas.get(_name(link))
        if replica is None:
            yield
            return
        replica.in_flight += weight
        try:
            yield
        finally:
            replica.in_flight -= weight

    def lost(self, link: L) -> bool:
        """Note that a server did not answer; whether there are others that do."""
        replica = self._replicas.get(_name(link))
        if replica is not None:
            replica.suspect = True
        return any(not each.suspect for each in self._replicas.values())

    def answered(self, link: L) -> None:
        """Note that a server answered."""
        replica = self._replicas.get(_name(link))
        if replica is not None:
            replica.suspect = False

    @property
    def links(self) -> list[L]:
        """Those that answer; all, where none does."""
        return [each.link for each in self._answering()]

    @property
    def suspects(self) -> list[L]:
        """Those that did not answer last."""
        return [each.link for each in self._replicas.values() if each.suspect]

    def __len__(self) -> int:
        return len(self._replicas)

    def _answering(self) -> list[_Replica[L]]:
        return [each for each in self._replicas.values() if not each.suspect] or list(self._replicas.values())


def _name(link: Reachable) -> _Name:
    return link.address, link.attempt
