"""Who is next: the order in which waiting jobs are tried.

Priorities first; among equals the project with the smallest share of the cluster, each by its weight; in a
project who waits longest. A project's share is that of the resource of which it holds the largest part
(dominant resource fairness), counted in slots and GPUs. So a flood from one project delays that project.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Generic, Protocol, TypeVar

from opentinker_scheduler.domain.model import Cost, Role, SlotSpec

NOTHING = Cost()


@dataclass(frozen=True, slots=True)
class Used:
    """What jobs held over time, and what was done for them."""

    slot_seconds: float = 0.0
    gpu_seconds: float = 0.0
    tokens_trained: int = 0
    tokens_sampled: int = 0

    def __add__(self, other: "Used") -> "Used":
        return Used(
            self.slot_seconds + other.slot_seconds,
            self.gpu_seconds + other.gpu_seconds,
            self.tokens_trained + other.tokens_trained,
            self.tokens_sampled + other.tokens_sampled,
        )


def used(cost: Cost, seconds: float) -> Used:
    """What a job of this cost uses in a while."""
    return Used(cost.slots * seconds, cost.gpus * seconds)


@dataclass(frozen=True, slots=True)
class Rules:
    """What one project may have. None: no limit."""

    weight: float = 1.0
    max_priority: int = 0
    max_jobs: int | None = 2000
    """Jobs at once that have not ended, waiting ones included."""
    max_slots: int | None = None
    max_gpus: float | None = None
    max_gpu_seconds_a_day: float | None = None
    max_tokens_a_day: int | None = None
    """Trained and sampled ones together."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """The rules of every project."""

    default: Rules = Rules()
    by_project: Mapping[str, Rules] = field(default_factory=dict)

    def of(self, project: str) -> Rules:
        return self.by_project.get(project, self.default)

    @property
    def meters_gpus(self) -> bool:
        """Whether any project's GPU-seconds are limited."""
        return any(
            rules.max_gpu_seconds_a_day is not None for rules in (self.default, *self.by_project.values())
        )

    @property
    def meters_tokens(self) -> bool:
        """Whether any project's tokens are limited."""
        return any(rules.max_tokens_a_day is not None for rules in (self.default, *self.by_project.values()))


@dataclass(frozen=True, slots=True)
class Shares:
    """How the cluster is divided now."""

    tenants: Tenants = Tenants()
    total: Cost = NOTHING
    held: Mapping[str, Cost] = field(default_factory=dict)
    """By project."""
    gpu_seconds: Mapping[str, float] = field(default_factory=dict)
    """By project, used today."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """By project, trained and sampled today."""


EVEN = Shares()
"""Nobody holds anything."""


class Waits(Protocol):
    """One that waits, as far as order goes."""

    @property
    def job_id(self) -> str: ...
    @property
    def project(self) -> str: ...
    @property
    def cost(self) -> Cost: ...
    @property
    def priority(self) -> int: ...
    @property
    def since(self) -> float:
        """When it was queued, in seconds of any one clock."""
        ...


W = TypeVar("W", bound=Waits)

PerServer = Callable[[SlotSpec], tuple[int, int]]
"""Slots and GPUs of a server that a slot would be on."""


def cost_of(slots: Sequence[SlotSpec], per_server: PerServer) -> Cost:
    """What a job with these slots keeps from others: an exclusive slot keeps its whole server."""
    total = NOTHING
    for spec in slots:
        on_one, gpus = per_server(spec)
        if spec.exclusive:
            # Replicas never share a server; the trainer slots of one job do.
            servers = spec.count if spec.role is Role.INFERENCE else -(-spec.count // on_one)
            total += Cost(float(servers * on_one), float(servers * gpus))
        else:
            total += Cost(float(spec.count), spec.count * gpus / on_one)
    return total


def over_quota(project: str, cost: Cost, shares: Shares, held: Cost) -> str:
    """Which quota keeps a project from starting a job of this cost now, in words; empty where none does."""
    rules = shares.tenants.of(project)
    if rules.max_slots is not None and held.slots + cost.slots > rules.max_slots:
        used = f"{_number(held.slots)} of its quota max_slots={rules.max_slots}"
        return f"project {project} holds {used}, and this job takes {_number(cost.slots)} more"
    if rules.max_gpus is not None and held.gpus + cost.gpus > rules.max_gpus + _EPSILON:
        used = f"{_number(held.gpus)} of its quota max_gpus={_number(rules.max_gpus)}"
        return f"project {project} holds {used}, and this job takes {_number(cost.gpus)} more"
    limit, spent = rules.max_gpu_seconds_a_day, shares.gpu_seconds.get(project, 0.0)
    if limit is not None and cost.gpus > 0 and spent >= limit:
        used = f"{_number(spent)} of its quota max_gpu_seconds_a_day={_number(limit)}"
        return f"project {project} used {used}; {_NEXT_DAY}"
    most, tokens = rules.max_tokens_a_day, shares.tokens.get(project, 0)
    if most is not None and tokens >= most:
        used = f"{tokens} tokens of its quota max_tokens_a_day={most}"
        return f"project {project} used {used}; {_NEXT_DAY}"
    return ""


_NEXT_DAY = "the next day begins at 00:00 UTC"
_EPSILON = 1e-9
"""Slack for sums of fractions of a GPU."""


def _number(value: float) -> str:
    return f"{value:.10g}" if value == round(value) else f"{value:.3g}"


class FairOrder(Generic[W]):
    """Gives out who waits, one after the other; told of every grant, it counts that for the next choice.

    Whoever was given out is not given out again, whether or not it was placed.
    """

    def __init__(self, waiting: Iterable[W], shares: Shares) -> None:
        self._shares = shares
        self._held: dict[str, Cost] = dict(shares.held)
        self._level: dict[str, float] = {}
        """Shares by weight, as far as they were asked for."""
        levels: dict[int, dict[str, list[W]]] = {}
        for one in waiting:
            levels.setdefault(one.priority, {}).setdefault(one.project, []).append(one)
        self._levels = [levels[priority] for priority in sorted(levels)]
        self._lines: dict[str, Iterator[W]] = {}
        self._heap: list[tuple[float, float, str, W]] = []
        self._last: str | None = None

    def held(self, project: str) -> Cost:
        """What a project holds, with all that it was granted since."""
        return self._held.get(project, NOTHING)

    def now(self) -> Shares:
        """The shares with all that was granted since."""
        return replace(self._shares, held=dict(self._held))

    def grant(self, project: str, cost: Cost) -> None:
        """A project got something. For the one that was given out last, or before the next is asked for."""
        self._held[project] = self.held(project) + cost
        self._level.pop(project, None)

    def rest(self) -> list[W]:
        """Everyone who was not given out yet, in no order; nobody is any more."""
        left = [one for *_, one in self._heap]
        left += [one for line in self._lines.values() for one in line]
        left += [one for level in self._levels for line in level.values() for one in line]
        self._heap, self._lines, self._levels, self._last = [], {}, [], None
        return left

    def __iter__(self) -> Iterator[W]:
        return self

    def __next__(self) -> W:
        if self._last is not None:
            self._push(self._last)
            self._last = None
        while not self._heap:
            if not self._levels:
                raise StopIteration
            # Within a project by time; equal times keep the order that they came in.
            self._lines = {
                project: iter(sorted(line, key=_since)) for project, line in self._levels.pop().items()
            }
            for project in self._lines:
                self._push(project)
        _, _, project, one = heapq.heappop(self._heap)
        self._last = project
        return one

    def _push(self, project: str) -> None:
        """The head of a project's line takes part in the next choice, at the share that it has now."""
        one = next(self._lines[project], None)
        if one is not None:
            level = self._level.get(project)
            if level is None:
                weight = self._shares.tenants.of(project).weight
                level = self._level[project] = self.held(project).share_of(self._shares.total) / weight
            heapq.heappush(self._heap, (level, one.since, project, one))


def _since(one: Waits) -> float:
    return one.since


def first(waiting: Iterable[W], shares: Shares, number: int) -> list[W]:
    """The first so many of these, if everyone before one got what it asks for."""
    order = FairOrder(waiting, shares)
    found: list[W] = []
    for one in islice(order, number):
        order.grant(one.project, one.cost)
        found.append(one)
    return found


def positions(waiting: Iterable[Waits], shares: Shares) -> dict[str, int]:
    """Where each of these would be if everyone before it got what it asks for; the first is 1."""
    order = FairOrder(waiting, shares)
    found: dict[str, int] = {}
    for number, one in enumerate(order, start=1):
        order.grant(one.project, one.cost)
        found[one.job_id] = number
    return found
