"""A catalog without a database: deployments whose jobs run as soon as they are made."""

from typing import Any

from client.tests.doubles.scheduler import SchedulerDouble
from client.tests.doubles.trainer import abort

from opentinkerapi.catalog.v1 import catalog_service_pb2 as pb
from opentinkerapi.catalog.v1 import deployment_pb2
from opentinkerapi.catalog.v1.catalog_service_pb2_grpc import CatalogServiceServicer
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2

NEWEST = 3
"""Of every policy."""


class CatalogDouble(CatalogServiceServicer):
    """Knows deployments; takes every policy and base model by its word."""

    def __init__(self, scheduler: SchedulerDouble) -> None:
        self._scheduler = scheduler
        self.deployments: dict[str, deployment_pb2.Deployment] = {}
        self.deleted: list[str] = []

    async def CreateDeployment(self, request: pb.CreateDeploymentRequest, context: Any) -> Any:
        name = f"deployments/{request.deployment_id}"
        if name in self.deployments:
            await abort(context, Reason.ALREADY_REGISTERED, f"there is {name} already")
        made = deployment_pb2.Deployment()
        made.CopyFrom(request.deployment)
        made.name, made.model = name, _pinned(made.model)
        made.state = deployment_pb2.DEPLOYMENT_STATE_SERVING
        made.job = f"jobs/of-{request.deployment_id}"
        slot = job_pb2.SlotSpec(role=job_pb2.SLOT_ROLE_INFERENCE)
        job = job_pb2.Job(name=made.job, state=job_pb2.JOB_STATE_RUNNING, slots=[slot])
        self._scheduler.jobs[made.job] = job
        self.deployments[name] = made
        return pb.CreateDeploymentResponse(deployment=made)

    async def GetDeployment(self, request: pb.GetDeploymentRequest, context: Any) -> Any:
        return pb.GetDeploymentResponse(deployment=await self._find(request.name, context))

    async def ListDeployments(self, request: pb.ListDeploymentsRequest, context: Any) -> Any:
        """One on each page, newest first."""
        names = list(reversed(self.deployments))
        at = int(request.page_token or 0)
        more = str(at + 1) if at + 1 < len(names) else ""
        page = [self.deployments[name] for name in names[at : at + 1]]
        return pb.ListDeploymentsResponse(deployments=page, next_page_token=more)

    async def PromoteDeployment(self, request: pb.PromoteDeploymentRequest, context: Any) -> Any:
        found = await self._find(request.name, context)
        found.previous_models.insert(0, found.model)
        found.model = _pinned(request.model)
        return pb.PromoteDeploymentResponse(deployment=found)

    async def RollBackDeployment(self, request: pb.RollBackDeploymentRequest, context: Any) -> Any:
        found = await self._find(request.name, context)
        if not found.previous_models:
            await abort(context, Reason.INVALID_STATE, "there is nothing to go back to")
        found.model = found.previous_models.pop(0)
        return pb.RollBackDeploymentResponse(deployment=found)

    async def DeleteDeployment(self, request: pb.DeleteDeploymentRequest, context: Any) -> Any:
        await self._find(request.name, context)
        del self.deployments[request.name]
        self.deleted.append(request.name)
        return pb.DeleteDeploymentResponse()

    async def ResolveModel(self, request: pb.ResolveModelRequest, context: Any) -> Any:
        found = self.deployments.get(request.name) or self.deployments.get(f"deployments/{request.name}")
        model = found.model if found is not None else _pinned(request.name)
        answer = pb.ResolveModelResponse(model=model, model_ref=_model_ref(model))
        answer.slot.role = job_pb2.SLOT_ROLE_INFERENCE
        answer.slot.base_model = "tiny"
        if found is not None:
            answer.deployment, answer.job = found.name, found.job
        return answer

    async def _find(self, name: str, context: Any) -> deployment_pb2.Deployment:
        if name not in self.deployments:
            await abort(context, Reason.DEPLOYMENT_NOT_FOUND, f"there is no {name}")
        return self.deployments[name]


def _pinned(model: str) -> str:
    if model.startswith("policies/") and model.count("/") == 1:
        return f"{model}/versions/{NEWEST}"
    return model if model.startswith(("policies/", "models/")) else f"models/{model}"


def _model_ref(model: str) -> sampling_pb2.ModelRef:
    if model.startswith("models/"):
        return sampling_pb2.ModelRef(base_model=model.removeprefix("models/"))
    if "/checkpoints/" in model:
        return sampling_pb2.ModelRef(checkpoint=model)
    policy, _, number = model.partition("/versions/")
    version = sampling_pb2.PolicyVersionRef(policy=policy, version=int(number))
    return sampling_pb2.ModelRef(policy_version=version)
