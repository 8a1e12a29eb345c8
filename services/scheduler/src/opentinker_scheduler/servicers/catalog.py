"""CatalogService: policies, versions, checkpoints, and what of them is served."""

from typing import Any

from opentinker_kit.auth import Access, current_principal
from opentinker_scheduler.application.answers import Answers
from opentinker_scheduler.application.catalog import Catalog
from opentinker_scheduler.application.deployments import Deployments, Seen
from opentinker_scheduler.application.exports import Exports
from opentinker_scheduler.application.jobs import Jobs
from opentinker_scheduler.application.pages import make_token, page_size, read_int
from opentinker_scheduler.application.resolution import Resolution
from opentinker_scheduler.domain.names import split
from opentinker_scheduler.domain.records import Deployment
from opentinker_scheduler.ports import Database, Transaction
from opentinker_scheduler.wire import deployments as deployment_wire
from opentinker_scheduler.wire import records as wire
from opentinkerapi.catalog.v1 import catalog_service_pb2 as pb
from opentinkerapi.catalog.v1 import deployment_pb2
from opentinkerapi.catalog.v1.catalog_service_pb2_grpc import CatalogServiceServicer


class CatalogServicer(CatalogServiceServicer):
    """What was trained is read by clients and written by trainers; deployments are the clients' own."""

    def __init__(
        self,
        database: Database,
        answers: Answers,
        catalog: Catalog,
        exports: Exports,
        deployments: Deployments,
        resolution: Resolution,
        jobs: Jobs,
    ) -> None:
        self._database = database
        self._answers = answers
        self._catalog = catalog
        self._exports = exports
        self._deployments = deployments
        self._resolution = resolution
        self._jobs = jobs

    async def RegisterPolicy(
        self, request: pb.RegisterPolicyRequest, context: Any
    ) -> pb.RegisterPolicyResponse:
        policy = wire.read_policy(request.policy)

        def register(tx: Transaction) -> pb.RegisterPolicyResponse:
            done = self._catalog.register_policy(
                tx, policy, request.version_sha256, request.version_manifest_key, request.attempt
            )
            return pb.RegisterPolicyResponse(policy=wire.write_policy(done))

        # A trainer that was restarted in between asks again from another server, under another attempt.
        return await self._answers.once(
            request, pb.RegisterPolicyResponse, register, ignore=("server", "attempt")
        )

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: Any) -> pb.GetPolicyResponse:
        scope = current_principal().scope
        policy = await self._database.run(lambda tx: self._catalog.policy(tx, request.name, scope))
        return pb.GetPolicyResponse(policy=wire.write_policy(policy))

    async def ListPolicies(self, request: pb.ListPoliciesRequest, context: Any) -> pb.ListPoliciesResponse:
        size = page_size(request.page_size)
        before = read_int("ListPolicies", request.job, request.page_token)
        job = split(request.job, "jobs") if request.job else ("",)
        if job is None:
            return pb.ListPoliciesResponse()
        scope = current_principal().scope
        found = await self._database.run(lambda tx: tx.catalog.page_policies(before, size + 1, job[0], scope))
        token = make_token("ListPolicies", request.job, found[size - 1].seq) if len(found) > size else ""
        return pb.ListPoliciesResponse(policies=map(wire.write_policy, found[:size]), next_page_token=token)

    async def DeletePolicy(self, request: pb.DeletePolicyRequest, context: Any) -> pb.DeletePolicyResponse:
        scope = current_principal().scope

        def delete(tx: Transaction) -> pb.DeletePolicyResponse:
            self._catalog.delete_policy(tx, request.name, scope)
            return pb.DeletePolicyResponse()

        return await self._answers.once(request, pb.DeletePolicyResponse, delete)

    async def RegisterVersion(
        self, request: pb.RegisterVersionRequest, context: Any
    ) -> pb.RegisterVersionResponse:
        asked = wire.read_version(request.version)
        version = await self._database.run(
            lambda tx: self._catalog.register_version(
                tx, request.policy, asked, request.attempt, request.keep_versions
            )
        )
        return pb.RegisterVersionResponse(version=wire.write_version(version))

    async def GetVersion(self, request: pb.GetVersionRequest, context: Any) -> pb.GetVersionResponse:
        scope = current_principal().scope
        version = await self._database.run(lambda tx: self._catalog.version(tx, request.name, scope))
        return pb.GetVersionResponse(version=wire.write_version(version))

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Any) -> pb.ListVersionsResponse:
        size, policy, scope = page_size(request.page_size), request.policy, current_principal().scope
        before = read_int("ListVersions", policy, request.page_token)
        found = await self._database.run(
            lambda tx: tx.catalog.page_versions(self._catalog.policy(tx, policy, scope).id, before, size + 1)
        )
        token = make_token("ListVersions", policy, found[size - 1].version) if len(found) > size else ""
        return pb.ListVersionsResponse(versions=map(wire.write_version, found[:size]), next_page_token=token)

    async def RegisterCheckpoint(
        self, request: pb.RegisterCheckpointRequest, context: Any
    ) -> pb.RegisterCheckpointResponse:
        asked = wire.read_checkpoint(request.checkpoint)
        checkpoint = await self._database.run(
            lambda tx: self._catalog.register_checkpoint(
                tx, request.policy, asked, request.attempt, request.keep_checkpoints
            )
        )
        return pb.RegisterCheckpointResponse(checkpoint=wire.write_checkpoint(checkpoint))

    async def GetCheckpoint(self, request: pb.GetCheckpointRequest, context: Any) -> pb.GetCheckpointResponse:
        scope = current_principal().scope
        checkpoint = await self._database.run(lambda tx: self._catalog.checkpoint(tx, request.name, scope))
        return pb.GetCheckpointResponse(checkpoint=wire.write_checkpoint(checkpoint))

    async def ListCheckpoints(
        self, request: pb.ListCheckpointsRequest, context: Any
    ) -> pb.ListCheckpointsResponse:
        size, policy, scope = page_size(request.page_size), request.policy, current_principal().scope
        before = read_int("ListCheckpoints", policy, request.page_token)
        found = await self._database.run(
            lambda tx: tx.catalog.page_checkpoints(
                self._catalog.policy(tx, policy, scope).id, before, size + 1
            )
        )
        token = make_token("ListCheckpoints", policy, found[size - 1].seq) if len(found) > size else ""
        page = map(wire.write_checkpoint, found[:size])
        return pb.ListCheckpointsResponse(checkpoints=page, next_page_token=token)

    async def ExportWeights(self, request: pb.ExportWeightsRequest, context: Any) -> pb.ExportWeightsResponse:
        export = await self._exports.export(request.name, current_principal().scope)
        files = [
            pb.ExportedFile(name=file.name, sha256=file.sha256, size_bytes=file.size_bytes, url=file.url)
            for file in export.files
        ]
        return pb.ExportWeightsResponse(kind=export.kind, files=files)

    async def DeleteCheckpoint(
        self, request: pb.DeleteCheckpointRequest, context: Any
    ) -> pb.DeleteCheckpointResponse:
        scope = current_principal().scope

        def delete(tx: Transaction) -> pb.DeleteCheckpointResponse:
            self._catalog.delete_checkpoint(tx, request.name, scope)
            return pb.DeleteCheckpointResponse()

        return await self._answers.once(request, pb.DeleteCheckpointResponse, delete)

    async def CreateDeployment(
        self, request: pb.CreateDeploymentRequest, context: Any
    ) -> pb.CreateDeploymentResponse:
        if given := await self._answers.given(request, pb.CreateDeploymentResponse):
            return given
        asked = deployment_wire.read_deployment(request.deployment_id, request.deployment)
        project = current_principal().project
        target, job = await self._deployments.plan(asked, project)

        def create(tx: Transaction) -> pb.CreateDeploymentResponse:
            made = self._deployments.create(tx, asked.id, target, job, project)
            return pb.CreateDeploymentResponse(deployment=self._written(tx, made))

        return await self._answers.once(request, pb.CreateDeploymentResponse, create)

    async def GetDeployment(self, request: pb.GetDeploymentRequest, context: Any) -> pb.GetDeploymentResponse:
        project = current_principal().project
        seen = await self._database.run(lambda tx: self._deployments.find(tx, request.name, project))
        return pb.GetDeploymentResponse(deployment=deployment_wire.write_deployment(seen))

    async def ListDeployments(
        self, request: pb.ListDeploymentsRequest, context: Any
    ) -> pb.ListDeploymentsResponse:
        size, project = page_size(request.page_size), current_principal().project
        before = read_int("ListDeployments", project, request.page_token)

        def read(tx: Transaction) -> pb.ListDeploymentsResponse:
            found = tx.deployments.page(project, before, size + 1)
            more = len(found) > size
            token = make_token("ListDeployments", project, found[size - 1].seq) if more else ""
            page = [self._written(tx, deployment) for deployment in found[:size]]
            return pb.ListDeploymentsResponse(deployments=page, next_page_token=token)

        return await self._database.run(read)

    async def PromoteDeployment(
        self, request: pb.PromoteDeploymentRequest, context: Any
    ) -> pb.PromoteDeploymentResponse:
        if given := await self._answers.given(request, pb.PromoteDeploymentResponse):
            return given
        name, project = request.name, current_principal().project
        target, job = await self._deployments.plan_promotion(name, request.model, project)

        def promote(tx: Transaction) -> pb.PromoteDeploymentResponse:
            done = self._deployments.promote(tx, name, target, job, project)
            return pb.PromoteDeploymentResponse(deployment=self._written(tx, done))

        return await self._answers.once(request, pb.PromoteDeploymentResponse, promote)

    async def RollBackDeployment(
        self, request: pb.RollBackDeploymentRequest, context: Any
    ) -> pb.RollBackDeploymentResponse:
        if given := await self._answers.given(request, pb.RollBackDeploymentResponse):
            return given
        name, project = request.name, current_principal().project
        _, job = await self._deployments.plan_promotion(name, "", project)

        def roll_back(tx: Transaction) -> pb.RollBackDeploymentResponse:
            done = self._deployments.roll_back(tx, name, job, project)
            return pb.RollBackDeploymentResponse(deployment=self._written(tx, done))

        return await self._answers.once(request, pb.RollBackDeploymentResponse, roll_back)

    async def DeleteDeployment(
        self, request: pb.DeleteDeploymentRequest, context: Any
    ) -> pb.DeleteDeploymentResponse:
        project = current_principal().project

        def delete(tx: Transaction) -> pb.DeleteDeploymentResponse:
            self._deployments.delete(tx, request.name, project)
            return pb.DeleteDeploymentResponse()

        return await self._answers.once(request, pb.DeleteDeploymentResponse, delete)

    async def ResolveModel(self, request: pb.ResolveModelRequest, context: Any) -> pb.ResolveModelResponse:
        principal = current_principal()
        resolved = await self._resolution.resolve(request.name, principal.project)
        usable = principal.may(Access.MEMBER) and resolved.job is not None
        token = self._jobs.sampling_token_of(resolved.job) if usable and resolved.job is not None else ""
        response = deployment_wire.write_resolved(resolved, token)
        if not usable:
            # Who only looks is told what a name stands for, and not how to use it.
            response.ClearField("endpoints")
        return response

    def _written(self, tx: Transaction, deployment: Deployment) -> deployment_pb2.Deployment:
        return deployment_wire.write_deployment(Seen(deployment, tx.jobs.find(deployment.job_id)))
