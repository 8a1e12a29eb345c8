"""Deployments as their user holds them: served under a name, without this client, until they are deleted.

guesser = result.policy.deploy("guesser").result()
print(guesser.chat("What is 2 + 2?").result())
client = openai.OpenAI(base_url=guesser.url, api_key=cluster.api_key)      # with model="guesser"
"""

import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Protocol, Self

from opentinker import errors
from opentinker.connection.portal import Pending
from opentinker.sampling.params import SamplingParams
from opentinker.serving.served import Messages
from opentinker.training.tuning import ServerOptions
from opentinkerapi.catalog.v1 import catalog_service_pb2 as pb
from opentinkerapi.catalog.v1 import deployment_pb2
from opentinkerapi.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from opentinkerapi.scheduler.v1 import scheduler_service_pb2
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:
    from opentinker.connection.cluster import Cluster

_COLLECTIONS = ("policies/", "models/", "deployments/")


class Named(Protocol):
    """What has a name in the catalog: a policy, a checkpoint."""

    @property
    def name(self) -> str: ...


Weights = str | Named


class Deployment:
    """A model served under a name. It and its servers go on when this client ends."""

    def __init__(self, cluster: "Cluster", found: deployment_pb2.Deployment, gateway: str) -> None:
        self._cluster = cluster
        self._found = found
        self._gateway = gateway
        self._served = cluster.model(found.name)

    @property
    def name(self) -> str:
        """Its name: what chat and OpenAI clients call the model."""
        return self._found.name.removeprefix("deployments/")

    @property
    def model(self) -> str:
        """What it serves: "policies/P/versions/N", "policies/P/checkpoints/C" or "models/BASE"."""
        return self._found.model

    @property
    def previous_models(self) -> Sequence[str]:
        """What it served before, the last first."""
        return tuple(self._found.previous_models)

    @property
    def base_model(self) -> str:
        """The base model."""
        return self._found.base_model

    @property
    def state(self) -> str:
        """Where it stood when this object last asked: "starting", "serving", "paused" or "failed"."""
        name = deployment_pb2.DeploymentState.Name(self._found.state)
        return name.removeprefix("DEPLOYMENT_STATE_").lower()

    @property
    def state_reason(self) -> str:
        """What it waits for, or why it failed."""
        return self._found.error.message or self._found.state_reason

    @property
    def url(self) -> str:
        """`base_url` for OpenAI clients. FailedPrecondition where the cluster has no gateway."""
        if not self._gateway:
            raise errors.FailedPrecondition(
                "this cluster has no gateway; chat() and the gRPC API work without one",
                reason=errors.Reason.INVALID_STATE,
            )
        return f"{self._gateway}/v1"

    def __repr__(self) -> str:
        return f"<Deployment {self.name} of {self.model}, {self.state}>"

    def refresh(self) -> Pending[Self]:
        """Ask how it stands."""

        async def ask() -> Self:
            request = pb.GetDeploymentRequest(name=self._found.name)
            answer = await self._cluster.control.call(
                lambda channel: CatalogServiceStub(channel).GetDeployment(request)
            )
            self._found = answer.deployment
            return self

        return Pending.of(self._cluster.portal, ask())

    def wait(self) -> Pending[Self]:
        """Wait until its servers answer with its weights. Raises why they cannot."""

        async def until() -> Self:
            await self._served.probe()
            return await self.refresh()

        return Pending.of(self._cluster.portal, until())

    def promote(self, model: Weights) -> Pending[Self]:
        """Serve other weights of the same base model: a policy (its newest version), a checkpoint, a name.

        They are loaded first, and raise here what is wrong with them; the deployment then goes on as it was.
        Requests that run end with the weights they began with.
        """

        async def switch() -> Self:
            target = await self._cluster.model(name_of(model)).resolve()
            if (await self.refresh()).state == "serving":
                try:
                    await self._served.probe(target.model_ref)
                except errors.FailedPrecondition as error:
                    # A merged server takes no second policy while requests of the first run: it will then.
                    if error.reason != errors.Reason.MERGED_ONE_VERSION:
                        raise
            request = pb.PromoteDeploymentRequest(
                name=self._found.name, model=target.model, request_id=f"promote-{uuid.uuid4().hex}"
            )
            answer = await self._cluster.control.call(
                lambda channel: CatalogServiceStub(channel).PromoteDeployment(request)
            )
            self._found = answer.deployment
            return self

        return Pending.of(self._cluster.portal, switch())

    def roll_back(self) -> Pending[Self]:
        """Serve again what was served before; once more goes back further."""

        async def back() -> Self:
            request = pb.RollBackDeploymentRequest(
                name=self._found.name, request_id=f"roll-back-{uuid.uuid4().hex}"
            )
            answer = await self._cluster.control.call(
                lambda channel: CatalogServiceStub(channel).RollBackDeployment(request)
            )
            self._found = answer.deployment
            return self

        return Pending.of(self._cluster.portal, back())

    def delete(self) -> Pending[None]:
        """Serve it no longer and free its servers; the weights stay."""
        return Pending.of(self._cluster.portal, _delete(self._cluster, self._found.name))

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, seed: int | None = None
    ) -> Pending[str]:
        """The reply to a conversation, or to one user message."""
        return self._served.chat(messages, params, seed=seed)

    def stream(
        self, messages: Messages, params: SamplingParams | None = None, *, seed: int | None = None
    ) -> AsyncGenerator[str, None]:
        """The reply as it is written."""
        return self._served.stream(messages, params, seed=seed)


def name_of(model: Weights) -> str:
    """The name of weights in the catalog; a text that is none is the id of a base model."""
    name = model if isinstance(model, str) else model.name
    return name if name.startswith(_COLLECTIONS) else f"models/{name}"


async def create(
    cluster: "Cluster", model: Weights, name: str, options: ServerOptions | None, *, wait: bool
) -> Deployment:
    """Record a deployment, and wait until it answers. One that cannot is not left behind."""
    wanted = deployment_pb2.Deployment(model=name_of(model))
    if options is not None:
        wanted.options.CopyFrom(options.to_wire())
        wanted.replicas = options.replicas
    request = pb.CreateDeploymentRequest(
        request_id=f"deploy-{uuid.uuid4().hex}", deployment_id=name, deployment=wanted
    )
    answer = await cluster.control.call(lambda channel: CatalogServiceStub(channel).CreateDeployment(request))
    made = Deployment(cluster, answer.deployment, await _gateway(cluster))
    if wait:
        try:
            await made.wait()
        except BaseException:
            with contextlib.suppress(errors.OpenTinkerError):
                await _delete(cluster, answer.deployment.name)
            raise
    return made


async def find(cluster: "Cluster", name: str) -> Deployment:
    """The deployment of a name. NotFound."""
    request = pb.GetDeploymentRequest(name=f"deployments/{name.removeprefix('deployments/')}")
    answer = await cluster.control.call(lambda channel: CatalogServiceStub(channel).GetDeployment(request))
    return Deployment(cluster, answer.deployment, await _gateway(cluster))


async def find_all(cluster: "Cluster") -> list[Deployment]:
    """Every deployment of the project, newest first."""
    gateway = await _gateway(cluster)
    found: list[Deployment] = []
    request = pb.ListDeploymentsRequest()
    while True:
        page = await cluster.control.call(
            lambda channel: CatalogServiceStub(channel).ListDeployments(request)
        )
        found += [Deployment(cluster, each, gateway) for each in page.deployments]
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


def deployments(*, cluster: "Cluster | None" = None) -> list[Deployment]:
    """What is served under a name in the cluster that is connected, newest first. Blocks."""
    from opentinker.connection.opening import active_cluster

    return (cluster or active_cluster()).deployments().result()


async def _delete(cluster: "Cluster", name: str) -> None:
    request = pb.DeleteDeploymentRequest(name=name, request_id=f"delete-{uuid.uuid4().hex}")
    await cluster.control.call(lambda channel: CatalogServiceStub(channel).DeleteDeployment(request))


async def _gateway(cluster: "Cluster") -> str:
    request = scheduler_service_pb2.GetClusterRequest()
    answer = await cluster.control.call(lambda channel: SchedulerServiceStub(channel).GetCluster(request))
    return answer.gateway_address
