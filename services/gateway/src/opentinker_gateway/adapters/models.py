"""The models of a cluster: names are resolved by the scheduler at each call, so that a promotion, a new
version or a replaced server is seen at once.
"""

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc.aio
import structlog

from opentinker_gateway.adapters.channels import Channels, typed_failures
from opentinker_gateway.adapters.jobs import OnDemandJobs, Served
from opentinker_gateway.adapters.served import ServedModel
from opentinker_gateway.adapters.tokenizers import Tokenizers
from opentinker_gateway.domain.callers import Caller
from opentinker_gateway.ports import ListedModel
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinkerapi.catalog.v1 import catalog_service_pb2
from opentinkerapi.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.runtime.channels import auth_metadata
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tls import TlsFiles
from opentinkerapi.scheduler.v1 import job_pb2, scheduler_service_pb2
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

log = structlog.get_logger()

PAUSE_S = 0.5
AFFINITY_SLACK = 4
"""How many more requests a conversation's own server may have than the idlest before it is left."""
MAX_CAPABILITIES = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take."""

    start_s: float
    """Until a model that nothing served answers."""
    idle_s: float
    """After which a model that was served on demand is not any more."""
    on_demand_jobs: int


class SchedulerModels:
    """Models by way of the scheduler."""

    def __init__(
        self, locate: Callable[[], str], clock: Clock, limits: Limits, *, tls: TlsFiles | None = None
    ) -> None:
        """`locate` says where the scheduler is now, `tls` how servers are called."""
        self._locate = locate
        self.clock = clock
        self._limits = limits
        self.channels = Channels(tls)
        self.tokenizers = Tokenizers()
        self.load: dict[str, int] = {}
        """Requests on each server, of this gateway."""
        self._jobs = OnDemandJobs(
            clock, most=limits.on_demand_jobs, idle_s=limits.idle_s, start_s=limits.start_s
        )
        self._capabilities: OrderedDict[tuple[str, int], pb.GetCapabilitiesResponse] = OrderedDict()

    async def open(self, name: str, caller: Caller) -> ServedModel:
        """The model of that name, once it is served."""
        resolved = await self.resolve(name, caller)
        served = await self.served(name, caller, resolved)
        endpoint = served.endpoints[0]
        channel = await self.channels.to(endpoint.address)
        metadata = auth_metadata(caller.key, served.job_token)
        capabilities = await self._capabilities_of(channel, endpoint, metadata)
        prompts = await self.tokenizers.of(channel, capabilities.tokenizer_digest, metadata)
        return ServedModel(self, caller, resolved, served, capabilities.sampling_fields, prompts)

    async def list(self, caller: Caller) -> list[ListedModel]:
        """Deployments, then base models, then policies."""
        scheduler = await self._scheduler()
        catalog = CatalogServiceStub(scheduler)
        metadata = auth_metadata(caller.key)
        with typed_failures():
            cluster = await SchedulerServiceStub(scheduler).GetCluster(
                scheduler_service_pb2.GetClusterRequest(), metadata=metadata
            )
            deployments = await catalog.ListDeployments(
                catalog_service_pb2.ListDeploymentsRequest(page_size=1000), metadata=metadata
            )
            policies = await catalog.ListPolicies(
                catalog_service_pb2.ListPoliciesRequest(page_size=1000), metadata=metadata
            )
        return [
            *(
                ListedModel(
                    each.name.removeprefix("deployments/"),
                    each.create_time.seconds,
                    each.project or "opentinker",
                    each.model,
                )
                for each in deployments.deployments
            ),
            *(ListedModel(each.model, 0, "opentinker", f"models/{each.model}") for each in cluster.models),
            *(
                ListedModel(
                    each.name,
                    each.create_time.seconds,
                    each.project or "opentinker",
                    f"{each.name}/versions/{each.latest_version}",
                )
                for each in policies.policies
            ),
        ]

    async def describe(self, name: str, caller: Caller) -> ListedModel:
        """What a name stands for."""
        resolved = await self.resolve(name, caller)
        return ListedModel(name, 0, "opentinker", resolved.model)

    async def ready(self) -> bool:
        """Whether the scheduler can be reached: an answer that refuses us is one too."""
        request = scheduler_service_pb2.GetClusterRequest()
        try:
            with typed_failures():
                await SchedulerServiceStub(await self._scheduler()).GetCluster(request, timeout=2.0)
        except ServiceError as error:
            if error.reason is Reason.CONNECTION_LOST:
                await self._say_why()
            return error.reason is Reason.UNAUTHENTICATED
        except ValueError:
            return False
        return True

    async def _say_why(self) -> None:
        """Where it is TLS that keeps the scheduler from being called, whoever reads the log has to see it."""
        if why := await self.channels.why_not(self._locate()):
            log.error("the scheduler cannot be called", error=why)

    async def keep_for_ever(self) -> None:
        """Keep the jobs that serve on demand."""
        while True:
            await self.clock.sleep(10.0)
            try:
                await self._jobs.keep(await self._scheduler())
            except Exception:
                log.exception("the jobs of the gateway cannot be kept now")

    async def close(self) -> None:
        """End the gateway's jobs and close its channels."""
        with contextlib.suppress(ServiceError, ValueError):
            await self._jobs.close(await self._scheduler())
        await self.channels.close()

    async def resolve(self, name: str, caller: Caller) -> catalog_service_pb2.ResolveModelResponse:
        """What a name stands for now."""
        request = catalog_service_pb2.ResolveModelRequest(name=name)
        catalog = CatalogServiceStub(await self._scheduler())
        with typed_failures():
            return await catalog.ResolveModel(request, metadata=auth_metadata(caller.key), timeout=30.0)

    async def served(
        self, name: str, caller: Caller, resolved: catalog_service_pb2.ResolveModelResponse
    ) -> Served:
        """Who serves it; a deployment is waited for, anything else gets a job where it has none."""
        deadline = self.clock.monotonic() + self._limits.start_s
        while not resolved.endpoints and resolved.deployment:
            if self.clock.monotonic() > deadline:
                text = (
                    f"{resolved.deployment} does not answer yet: {resolved.state_reason or 'it is starting'}"
                )
                raise ServiceError(Reason.SERVER_STARTING, text, retry_after_s=5.0)
            await self.clock.sleep(PAUSE_S)
            resolved = await self.resolve(name, caller)
        if resolved.endpoints:
            token = resolved.job_token
            return Served(tuple(resolved.endpoints), lambda: token)
        return await self._jobs.serve(await self._scheduler(), resolved.slot, caller)

    def lost(self, resolved: catalog_service_pb2.ResolveModelResponse, caller: Caller) -> None:
        """A server of it did not answer."""
        self._jobs.lost(resolved.slot, caller)

    def choose(self, endpoints: Sequence[job_pb2.Endpoint], conversation: str) -> job_pb2.Endpoint:
        """The server that has the conversation's beginning, unless it has too much to do; else the idlest."""
        idlest = min(endpoints, key=lambda each: self.load.get(each.address, 0))
        if not conversation:
            return idlest
        own = max(endpoints, key=lambda each: _rank(each.server or each.address, conversation))
        extra = self.load.get(own.address, 0) - self.load.get(idlest.address, 0)
        return own if extra <= AFFINITY_SLACK else idlest

    async def _scheduler(self) -> grpc.aio.Channel:
        return await self.channels.to(self._locate())

    async def _capabilities_of(
        self, channel: grpc.aio.Channel, endpoint: job_pb2.Endpoint, metadata: Sequence[tuple[str, str]]
    ) -> pb.GetCapabilitiesResponse:
        key = (endpoint.address, endpoint.attempt)
        if key not in self._capabilities:
            with typed_failures():
                self._capabilities[key] = await InferenceServiceStub(channel).GetCapabilities(
                    pb.GetCapabilitiesRequest(), metadata=metadata, timeout=30.0
                )
            if len(self._capabilities) > MAX_CAPABILITIES:
                self._capabilities.popitem(last=False)
        return self._capabilities[key]


def _rank(server: str, conversation: str) -> bytes:
    """By the highest of these each conversation has one server, whichever others come and go."""
    return hashlib.sha256(f"{server}/{conversation}".encode()).digest()
