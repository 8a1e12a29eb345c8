"""Servers on the nodes of a Ray cluster: a placement group for each, a bundle for each rank, in each bundle
an actor that starts a process and tells how it ended.

Groups and actors are detached: they outlive the scheduler, and its successor finds them by their names in the
namespace of this cluster. What is there and belongs to no server on record is removed.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog

from opentinker_scheduler.adapters.processes import (
    LOG,
    environment_names,
    forget_old_folders,
    last_lines,
    read_part,
)
from opentinker_scheduler.adapters.ray_cluster import Bundle, RayActor, RayCluster, RayLost
from opentinker_scheduler.domain.model import Role, Server
from opentinker_scheduler.domain.nodes import Node
from opentinker_scheduler.launcher_ports import OnExit, Started
from opentinker_scheduler.log_ports import LogPart

log = structlog.get_logger()

_POLL_S = 10.0
"""An agent says at least so often that it is there, and how its log ends."""
_ANSWER_S = 20.0
_PLACED_EVERY_S = 0.5
_STOP_SLACK_S = 10.0
_AVOID_S = 120.0
_KEPT_TAILS = 64
_FETCH_S, _FETCH_BYTES, _MAX_LOG = 10.0, 1 << 20, 64 << 20
_KEY = "rank.key"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RayRecipe:
    """How to start servers on nodes."""

    directory: Path
    """What ended servers logged last is kept here, in a folder for each."""
    python: str
    """Interpreter on the nodes; empty: the one that Ray runs there."""
    modules: Mapping[str, str]
    told: Callable[[Server], tuple[Mapping[str, Any], Mapping[str, Path]]]
    """The settings of a server, in which `{folder}` and `{address}` stand for what only the node knows, and
    the files of this host that they name as `{folder}/NAME`, by name."""
    bundle_for: Callable[[Server], Bundle]
    """What each rank of a server takes."""
    new_key: Callable[[], str]
    """A secret for the ranks of a server."""
    adds_nodes: str = ""
    """Who adds nodes where none is free."""


@dataclass(slots=True)
class _Group:
    """A server's actors: its front, then the hosts of its other ranks."""

    agents: list[RayActor]
    nodes: list[str]
    """Ray's ids of the nodes that they are on."""
    started: Started
    tail: str = ""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    removed: asyncio.Event = field(default_factory=asyncio.Event)
    watching: list[asyncio.Task[None]] = field(default_factory=list)


class RayLauncher:
    """See `launcher_ports.Launcher`. Used from one event loop; `RayCluster` has a thread for what blocks."""

    def __init__(self, recipe: RayRecipe, cluster: RayCluster, on_exit: OnExit) -> None:
        self._recipe = recipe
        self._cluster = cluster
        self._on_exit = on_exit
        self._groups: dict[str, _Group] = {}
        self._leaving: dict[str, _Group] = {}
        """Of servers that ended, until nothing of them is left."""
        self._avoided: dict[str, float] = {}
        """Until when nothing is started on a node: Ray finds out late that one is gone."""
        self._waiting: dict[str, str] = {}
        self._tails: dict[str, str] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return "ray"

    @property
    def can_launch(self) -> bool:
        return True

    async def start(self, server: Server) -> Started:
        if server.id in self._groups:
            return self._groups[server.id].started
        if (before := self._leaving.get(server.id)) is not None:
            await before.removed.wait()
        try:
            group = await self._start(server)
        except BaseException as error:
            # Also where nobody wants it any more: what was asked for would stay reserved.
            await asyncio.shield(self._remove(server.id))
            if isinstance(error, RayLost):
                raise OSError(str(error)) from error
            raise
        finally:
            self._waiting.pop(server.id, None)
        self._watch(server.id, group)
        log.info("started", server=server.name, role=server.role, pid=group.started.pid)
        return group.started

    async def adopt(self, servers: Sequence[Server]) -> Mapping[str, Started]:
        try:
            await self._cluster.connect()
            await self._adopt({server.id: server for server in servers})
        except RayLost as error:
            raise OSError(f"the launcher is ray, and its cluster is not there: {error}") from error
        self._looking = asyncio.get_running_loop().create_task(self._look())
        return {server_id: group.started for server_id, group in self._groups.items()}

    async def _adopt(self, expected: Mapping[str, Server]) -> None:
        for server_id in await self._cluster.groups():
            server = expected.get(server_id)
            if server is None or not server.pid:
                log.warning("removing what no server record claims", server=server_id)
                await self._remove(server_id)
                continue
            agents = await self._cluster.actors(server_id, _ranks(server))
            if agents is None:
                await self._remove(server_id)
                continue
            started = Started(server.pid, server.pid_start, Path(server.log_path))
            try:
                nodes = await _nodes_of(agents)
            except RayLost as error:
                log.warning("a node or an actor was lost meanwhile", server=server_id, error=str(error))
                await self._remove(server_id)
                continue
            self._watch(server_id, _Group(agents, nodes, started))

    async def stop(self, server_id: str, grace_s: float) -> None:
        group = self._groups.get(server_id) or self._leaving.get(server_id)
        if group is None:
            return
        with contextlib.suppress(RayLost):
            await _within(group.agents[0].call("stop", grace_s), grace_s + _STOP_SLACK_S)
        # Whoever watches sees the end; on a node that is lost it is not to be waited for.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await group.gone.wait()
        if server_id in self._groups:
            await self._ended(server_id, None)
        # What it reserved would stay reserved if this scheduler ended now.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SLACK_S + _FETCH_S):
                await group.removed.wait()

    def watched(self) -> Collection[str]:
        return tuple(self._groups)

    def nodes(self) -> Sequence[Node]:
        # Where nodes are added, those that are there limit nothing.
        return () if self._recipe.adds_nodes else self._cluster.nodes

    def waits(self) -> Mapping[str, str]:
        return dict(self._waiting)

    def log_tail(self, server_id: str) -> str:
        group = self._groups.get(server_id)
        return last_lines(group.tail if group is not None else self._tails.get(server_id, ""))

    async def read_log(self, server_id: str, offset: int, limit: int) -> LogPart | None:
        if (leaving := self._leaving.get(server_id)) is not None:
            # It is being fetched, whole where its node still answers.
            await leaving.removed.wait()
        group = self._groups.get(server_id)
        if group is None:
            return await asyncio.to_thread(read_part, self._kept_log(server_id), offset, limit)
        try:
            data, size = await _within(group.agents[0].call("read_log", offset, limit), _ANSWER_S)
        except RayLost:
            return None
        return LogPart(data, size)

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for group in self._groups.values():
            for task in group.watching:
                task.cancel()
        self._groups.clear()
        self._cluster.close()

    async def _look(self) -> None:
        """Keep an eye on which nodes there are."""
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self._cluster.look()
            except RayLost as error:
                log.warning("Ray does not say which nodes it has", error=str(error))

    async def _start(self, server: Server) -> _Group:
        bundle, ranks = self._recipe.bundle_for(server), _ranks(server)
        now = time.monotonic()
        avoid = [node for node, until in self._avoided.items() if now < until]
        await self._cluster.make_group(server.id, [bundle] * ranks, avoid)
        while not await self._cluster.placed(server.id):
            self._waiting[server.id] = self._lacking(bundle, ranks)
            await asyncio.sleep(_PLACED_EVERY_S)
        self._waiting.pop(server.id, None)
        agents = await self._cluster.make_actors(server.id, bundle, ranks)
        key = self._recipe.new_key()
        hosts = await asyncio.gather(
            *(self._host(server, rank, agents[rank], key) for rank in range(1, ranks))
        )
        told, named = self._recipe.told(server)
        settings = dict(told)
        files = {name: path.read_text() for name, path in named.items()}
        if hosts:
            settings |= {
                "rank_hosts": list(hosts),
                "rank_address": "{address}",
                "rank_key_file": "{folder}/" + _KEY,
            }
            files[_KEY] = key
        argv = [self._python, "-P", "-m", self._recipe.modules[server.role], "--settings"]
        order = self._order(server.id, [*argv, "{folder}/settings.json"], files, settings)
        said = await _within(agents[0].call("start", order), _ANSWER_S)
        self._check_reachable(str(settings.get("scheduler_address", "")), str(said["address"]))
        started = Started(int(said["pid"]), float(said["pid_start"]), Path(said["log_path"]))
        return _Group(agents, await _nodes_of(agents), started)

    async def _host(self, server: Server, rank: int, agent: RayActor, key: str) -> str:
        """Start the host of a rank; its address."""
        options = {
            "--listen": "{address}:0",
            "--key-file": "{folder}/" + _KEY,
            "--directory": "{folder}/files",
            "--ready-file": "{folder}/ready.json",
            "--lifeline-fd": "{lifeline}",
        }
        argv = [self._python, "-P", "-m", f"{self._recipe.modules[server.role]}.rank_host"]
        argv += [part for option in options.items() for part in option]
        await _within(
            agent.call("start", self._order(f"{server.id}-{rank}", argv, {_KEY: key}, None)), _ANSWER_S
        )
        return str((await _within(agent.call("ready"), 4 * _ANSWER_S))["address"])

    def _order(
        self, name: str, argv: Sequence[str], files: Mapping[str, str], settings: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "cluster": self._cluster.namespace,
            "name": name,
            "argv": list(argv),
            "files": dict(files),
            "settings": None if settings is None else dict(settings),
            "drop": sorted(environment_names(settings or ())),
        }

    @property
    def _python(self) -> str:
        return self._recipe.python or "{python}"

    def _lacking(self, bundle: Bundle, ranks: int) -> str:
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        text = f"waiting for the Ray cluster to have {f'{ranks} times ' if ranks > 1 else ''}{wanted} free"
        who = self._recipe.adds_nodes
        return f"{text}; {who} was asked for nodes" if who else f"{text}; nobody adds nodes to it"

    def _check_reachable(self, scheduler: str, node: str) -> None:
        if scheduler.split("//")[-1].startswith(("127.", "localhost", "[::1]")) and not node.startswith(
            "127."
        ):
            raise RayLost(
                f"the node {node} cannot reach this scheduler, which says that it is at {scheduler}; set "
                "listen_host, or scheduler_address, to an address that the nodes know"
            )

    def _watch(self, server_id: str, group: _Group) -> None:
        self._groups[server_id] = group
        for index, agent in enumerate(group.agents):
            task = asyncio.get_running_loop().create_task(self._follow(server_id, group, index, agent))
            group.watching.append(task)

    async def _follow(self, server_id: str, group: _Group, index: int, agent: RayActor) -> None:
        """Wait for the end of one process of a server, which is the end of the server."""
        code: int | None = None
        try:
            while True:
                said = await _within(agent.call("ended", _POLL_S), _POLL_S + _ANSWER_S)
                if index == 0:
                    group.tail = str(said["tail"])
                if said["code"] is not None:
                    code = int(said["code"])
                    break
        except RayLost as error:
            log.warning("a node or an actor is lost", server=server_id, rank=index, error=str(error))
            if error.silent:
                self._avoided[group.nodes[index]] = time.monotonic() + _AVOID_S
        if index > 0:
            code = None
        if self._groups.get(server_id) is group:
            await asyncio.shield(self._ended(server_id, code))

    async def _ended(self, server_id: str, code: int | None) -> None:
        group = self._groups.pop(server_id, None)
        if group is None:
            # Somebody else saw it end, too.
            return
        self._tails[server_id] = group.tail
        while len(self._tails) > _KEPT_TAILS:
            del self._tails[next(iter(self._tails))]
        group.gone.set()
        current = asyncio.current_task()
        for task in group.watching:
            if task is not current:
                task.cancel()
        log.info("ended", server=server_id, exit_code=code)
        self._leaving[server_id] = group
        self._on_exit(server_id, code)
        await self._keep_log(server_id, group)
        await self._remove(server_id)
        del self._leaving[server_id]
        group.removed.set()

    async def _keep_log(self, server_id: str, group: _Group) -> None:
        """Bring a server's log here: its node, or its folder there, may be gone when somebody asks for it."""
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(_FETCH_S):
                while (at := sum(map(len, parts))) < _MAX_LOG:
                    data, _ = await group.agents[0].call("read_log", at, _FETCH_BYTES)
                    if not data:
                        break
                    parts.append(data)
        except (RayLost, TimeoutError):
            log.info("the log of a server is kept in part", server=server_id)
        path = self._kept_log(server_id)
        await asyncio.to_thread(_write_log, path, b"".join(parts) or group.tail.encode())

    def _kept_log(self, server_id: str) -> Path:
        return self._recipe.directory / server_id / LOG

    async def _remove(self, server_id: str) -> None:
        try:
            await self._cluster.remove(server_id)
        except RayLost as error:
            log.warning("a placement group stays", server=server_id, error=str(error))


def _ranks(server: Server) -> int:
    return max(1, server.options.ranks) if server.role is Role.TRAINER else 1


def _write_log(path: Path, data: bytes) -> None:
    with contextlib.suppress(OSError):
        forget_old_folders(path.parent.parent, ())
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(data)


async def _within(answer: Awaitable[T], seconds: float) -> T:
    """An answer of an actor. RayLost if it does not come in time."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError as error:
        raise RayLost(f"an actor did not answer for {seconds:g} s", silent=True) from error


async def _nodes_of(agents: Sequence[RayActor]) -> list[str]:
    return [str(node) for node in await asyncio.gather(*(_within(a.call("node"), _ANSWER_S) for a in agents))]
