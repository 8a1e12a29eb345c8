"""What the cluster is, for those who ask."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentinker_scheduler.domain.admission import Offer
from opentinker_scheduler.domain.model import Role, Server, ServerState
from opentinker_scheduler.ports import Database, ModelSource


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """The answer of GetCluster."""

    name: str
    version: str
    models: Mapping[str, bool]
    """Models known by name or in memory; True for those in memory."""
    max_servers: int
    running_servers: int
    trainer_engines: Sequence[str]
    inference_engines: Sequence[str]
    env_host_address: str
    gateway_address: str


class Cluster:
    """Describes the cluster."""

    def __init__(
        self,
        database: Database,
        offer: Offer,
        models: ModelSource,
        *,
        version: str,
        env_host_address: str,
        gateway_address: str = "",
    ) -> None:
        self._database = database
        self._offer = offer
        self._models = models
        self.name = ""
        """Identity of the cluster, known once its database is open."""
        self._version = version
        self._env_host_address = env_host_address
        self._gateway_address = gateway_address

    async def describe(self) -> ClusterInfo:
        """As it is now."""
        servers = await self._database.run(lambda tx: tx.servers.live())
        known = await self._models.known()
        loaded = [server.base_model for server in servers if server.state is ServerState.READY]
        return ClusterInfo(
            name=self.name,
            version=self._version,
            models={**dict.fromkeys(known, False), **dict.fromkeys(loaded, True)},
            max_servers=self._offer.limits.max_servers if self._offer.limits.can_launch else 0,
            running_servers=len(servers),
            trainer_engines=self._engines(Role.TRAINER, servers),
            inference_engines=self._engines(Role.INFERENCE, servers),
            env_host_address=self._env_host_address,
            gateway_address=self._gateway_address,
        )

    def _engines(self, role: Role, servers: Sequence[Server]) -> Sequence[str]:
        """Engines that can be started, or those of the servers that registered themselves."""
        if self._offer.limits.can_launch:
            return self._offer.engines[role]
        there = (server.reported.engine for server in servers if server.role is role)
        return sorted({engine for engine in there if engine})
