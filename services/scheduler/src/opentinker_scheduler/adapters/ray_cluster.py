"""What the launcher needs of Ray, in words of its own. Ray is imported when a cluster is connected to."""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

from opentinker_scheduler.adapters import node_agent
from opentinker_scheduler.domain.nodes import Node

log = structlog.get_logger()

Bundle = Mapping[str, float]
"""Ray resources of one rank, as in {"CPU": 1, "GPU": 1}."""

_ACCELERATOR = "accelerator_type:"
_NODE_ID = "ray.io/node-id"
"""A label that Ray gives each node."""
_STOP_S = 3.0
_GLANCE_S = 0.01

T = TypeVar("T")


class RayLost(Exception):
    """Ray, a node or an actor does not answer, or refuses."""

    def __init__(self, text: str, *, silent: bool = False) -> None:
        """`silent`: nothing answers there, so its node may be gone, whatever Ray still thinks."""
        super().__init__(text)
        self.silent = silent


class RayActor:
    """A `NodeAgent` on a node."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call it. RayLost if it is gone; what it raised, as RayLost too."""
        import ray

        try:
            future = getattr(self._handle, method).remote(*arguments).future()
        except Exception as error:
            # Of no kind of its own: Ray does not know the actor any more.
            raise RayLost(f"an actor is gone: {str(error).splitlines()[0]}") from error
        try:
            # Shielded: Ray completes the future whether or not somebody still waits.
            return await asyncio.shield(asyncio.wrap_future(future))
        except ray.exceptions.RayTaskError as error:
            raise RayLost(str(error.cause)) from error
        except ray.exceptions.ActorUnavailableError as error:
            raise RayLost(f"an actor is silent: {str(error).splitlines()[0]}", silent=True) from error
        except ray.exceptions.RayError as error:
            raise RayLost(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error


class RayCluster:
    """Placement groups and actors of one OpenTinker cluster. Calls block in one thread, in order."""

    def __init__(self, address: str, cluster: Callable[[], str]) -> None:
        """`address` as `ray.init` takes it: `HOST:PORT`, `ray://HOST:PORT` or `auto`."""
        self._address = address
        self._cluster = cluster
        self.namespace = ""
        """Of everything that belongs to this OpenTinker cluster; known once connected."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._nodes: tuple[Node, ...] = ()
        self._agent: Any = None
        self._closed = False

    async def connect(self) -> None:
        """Connect. RayLost if the cluster does not answer."""
        self.namespace = f"opentinker-{self._cluster()}"
        await self._do(self._connect)
        await self.look()

    async def look(self) -> None:
        """Find out which nodes there are."""
        self._nodes = await self._do(self._look)

    @property
    def nodes(self) -> Sequence[Node]:
        """Nodes of the cluster, as of the last look."""
        return self._nodes

    async def make_group(self, name: str, bundles: Sequence[Bundle], avoid: Collection[str] = ()) -> None:
        """Ask for room, not on the nodes with these ids; asking again changes nothing."""
        await self._do(lambda: self._make_group(name, bundles, avoid))

    async def placed(self, name: str) -> bool:
        """Whether a group has its room."""
        return await self._do(lambda: bool(self._group(name).wait(_GLANCE_S)))

    async def make_actors(self, name: str, bundle: Bundle, count: int) -> list[RayActor]:
        """An actor in each bundle of a group."""
        return await self._do(lambda: [self._make_actor(name, bundle, index) for index in range(count)])

    async def groups(self) -> Sequence[str]:
        """Names of the groups that are there, of this cluster."""
        return await self._do(self._groups)

    async def actors(self, name: str, count: int) -> list[RayActor] | None:
        """The actors of a group, or None if one of them is gone."""
        return await self._do(lambda: self._actors(name, count))

    async def remove(self, name: str) -> None:
        """Remove a group with its actors, if it is there."""
        await self._do(lambda: self._remove(name))

    def close(self) -> None:
        """Disconnect. What is detached stays."""

        def leave() -> None:
            import ray

            ray.shutdown()

        if self._closed:
            return
        self._closed = True
        # Waited for: who connects next in this process must not be cut off.
        self._thread.submit(leave)
        self._thread.shutdown()

    async def _do(self, work: Callable[[], T]) -> T:
        """Run something that blocks. RayLost if Ray does not do it."""

        def guarded() -> T:
            try:
                return work()
            except RayLost:
                raise
            # Ray raises RuntimeError, ConnectionError, ValueError and kinds of its own.
            except Exception as error:
                text = str(error).splitlines()
                raise RayLost(f"Ray: {text[0] if text else type(error).__name__}") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if not ray.is_initialized():
            ray.init(
                self._address,
                namespace=self.namespace,
                log_to_driver=False,
                configure_logging=False,
                logging_level="WARNING",
            )
        # By value: nodes need not have the scheduler's code.
        ray.cloudpickle.register_pickle_by_value(node_agent)
        self._agent = ray.remote(node_agent.NodeAgent)

    def _look(self) -> tuple[Node, ...]:
        import ray

        found: list[Node] = []
        for node in ray.nodes():
            if node["Alive"]:
                resources: Mapping[str, float] = node["Resources"]
                kinds = [key.removeprefix(_ACCELERATOR) for key in resources if key.startswith(_ACCELERATOR)]
                name = f"{node['NodeManagerAddress']}-{node['NodeID'][:8]}"
                found.append(Node(name, int(resources.get("GPU", 0)), kinds[0] if kinds else ""))
        return tuple(found)

    def _make_group(self, name: str, bundles: Sequence[Bundle], avoid: Collection[str]) -> None:
        from ray.util.placement_group import placement_group

        if name in self._groups():
            return
        elsewhere = {_NODE_ID: f"!in({','.join(sorted(avoid))})"}
        placement_group(
            [dict(one) for one in bundles],
            # Ranks belong together: on one node where they fit, on few otherwise.
            strategy="PACK",
            name=self._full(name),
            lifetime="detached",
            bundle_label_selector=[elsewhere] * len(bundles) if avoid else None,
        )

    def _group(self, name: str) -> Any:
        import ray

        return ray.util.get_placement_group(self._full(name))

    def _make_actor(self, name: str, bundle: Bundle, index: int) -> RayActor:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group(name), index)
        others = {key: amount for key, amount in bundle.items() if key not in ("CPU", "GPU", "memory")}
        options: dict[str, Any] = {
            "name": _actor(name, index),
            "namespace": self.namespace,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": 0,
            "max_task_retries": 0,
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "resources": others or None,
            "scheduling_strategy": where,
        }
        if "memory" in bundle:
            options["memory"] = bundle["memory"]
        return RayActor(self._agent.options(**options).remote())

    def _groups(self) -> list[str]:
        import ray

        prefix = self._full("")
        table = ray.util.placement_group_table()
        names = (one["name"] for one in table.values() if one["state"] != "REMOVED")
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def _actors(self, name: str, count: int) -> list[RayActor] | None:
        import ray

        try:
            return [
                RayActor(ray.get_actor(_actor(name, index), namespace=self.namespace))
                for index in range(count)
            ]
        except ValueError:
            return None

    def _remove(self, name: str) -> None:
        import ray

        actors = [
            ray.get_actor(one["name"], namespace=self.namespace)
            for one in ray.util.list_named_actors(all_namespaces=True)
            if one["namespace"] == self.namespace and one["name"].rpartition(".")[0] == name
        ]
        # Those that answer end what their process started, too.
        if actors:
            ray.wait([actor.stop.remote(0.0) for actor in actors], num_returns=len(actors), timeout=_STOP_S)
        for actor in actors:
            ray.kill(actor)
        if name in self._groups():
            ray.util.remove_placement_group(self._group(name))

    def _full(self, name: str) -> str:
        return f"{self.namespace}/{name}"


def _actor(group: str, index: int) -> str:
    return f"{group}.{index}"
