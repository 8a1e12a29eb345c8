"""A scheduler and an inference server without a model: what they are told to say, they say."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np

from opentinkerapi.catalog.v1 import catalog_service_pb2, deployment_pb2, policy_pb2
from opentinkerapi.catalog.v1.catalog_service_pb2_grpc import (
    CatalogServiceServicer,
    add_CatalogServiceServicer_to_server,
)
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.inference.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from opentinkerapi.runtime.reasons import CATALOGUE, Reason
from opentinkerapi.runtime.render import ChatTokenizer
from opentinkerapi.runtime.status import DETAILS_KEY, StatusData, encode
from opentinkerapi.runtime.tensors import pack, pack_floats, pack_ids, unpack_ids
from opentinkerapi.scheduler.v1 import account_pb2, account_service_pb2, job_pb2, scheduler_service_pb2
from opentinkerapi.scheduler.v1.account_service_pb2_grpc import (
    AccountServiceServicer,
    add_AccountServiceServicer_to_server,
)
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)

BASE = "tiny"
KEY = "bootstrap-key"
FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "top_logprobs", "prompt_logprobs")


async def abort(context: Any, reason: Reason, message: str, field: str = "") -> None:
    """End a call as a server on the kit does."""
    code = CATALOGUE[reason].code
    violations = [(field, message)] if field else []
    status = encode(StatusData(code=code, message=message, reason=reason, violations=violations))
    await context.abort(code, message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),))


@dataclass
class Inference(InferenceServiceServicer):
    """Says `script[i]` to the i-th request (the last again and again); completion i > 0 of one has its index
    after it.
    """

    files: Mapping[str, bytes]
    script: list[str] = field(default_factory=lambda: ["hello"])
    requests: list[pb.SampleRequest] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)
    fields: tuple[str, ...] = FIELDS
    context_tokens: int = 2048
    before: Callable[[pb.SampleRequest, Any], Any] | None = None
    break_after: int | None = None
    """Tokens after which each stream breaks off, once."""
    version: int = 3
    chunk: int = 1
    """Tokens in a delta."""
    end: bool = True
    gate: asyncio.Event | None = None
    """What stands between the first delta and the others."""
    endless: bool = False
    """Say the script's text again and again, each time in one delta."""
    sent: int = 0
    """Deltas that were taken by the transport."""

    def __post_init__(self) -> None:
        self.tokenizer = ChatTokenizer(self.files)

    def prompt(self, index: int = -1) -> list[int]:
        """The ids of a request's prompt."""
        return unpack_ids(self.requests[index].prompt.chunks[0].tokens.token_ids)

    def prompt_text(self, index: int = -1) -> str:
        return self.tokenizer.decode(self.prompt(index), skip_special_tokens=False)

    async def StreamSample(self, request: pb.StreamSampleRequest, context: Any) -> AsyncIterator[Any]:
        sample = request.sample
        self.keys.append(dict(context.invocation_metadata()).get("authorization", ""))
        if self.before is not None:
            await self.before(sample, context)
        said = self.script[min(len(self.requests), len(self.script) - 1)]
        self.requests.append(sample)
        prompt = unpack_ids(sample.prompt.chunks[0].tokens.token_ids)
        if len(prompt) >= self.context_tokens:
            text = f"the prompt has {len(prompt)} tokens and the context holds {self.context_tokens}"
            await abort(context, Reason.PROMPT_TOO_LONG, text, "prompt")
        yield pb.StreamSampleResponse(
            started=sampling_pb2.EffectiveParams(params=sample.params, prompt_tokens=len(prompt))
        )
        if sample.params.prompt_logprobs:
            scores = pack_floats([float("nan"), *[-2.0] * (len(prompt) - 1)])
            yield pb.StreamSampleResponse(prompt_logprobs=pb.PromptLogprobs(logprobs=scores))
        for index in range(sample.n or 1):
            async for response in self._completion(
                sample, said + (str(index) if index else ""), index, context
            ):
                yield response

    async def _completion(self, sample: Any, text: str, index: int, context: Any) -> AsyncIterator[Any]:
        ids = self.tokenizer.encode(text)
        ids += [self.tokenizer.eos_ids[0]] if self.end else []
        logprobs = [-0.25 * (1 + i % 3) for i in range(len(ids))]
        k = sample.params.top_logprobs
        while self.endless:
            yield pb.StreamSampleResponse(delta=sampling_pb2.CompletionDelta(index=index, text=text))
            self.sent += 1
        done = bytearray()
        for start in range(0, len(ids), self.chunk):
            if self.break_after is not None and start >= self.break_after:
                self.break_after = None
                await abort(context, Reason.ENGINE_CRASHED, "the engine died")
            part = ids[start : start + self.chunk]
            done += b"".join(self.tokenizer.token_bytes([i for i in part if i not in self.tokenizer.eos_ids]))
            try:
                whole, done = done.decode(), bytearray()
            except UnicodeDecodeError:
                whole = ""
            delta = sampling_pb2.CompletionDelta(
                index=index,
                token_ids=pack_ids(part),
                logprobs=pack_floats(logprobs[start : start + self.chunk]),
                text=whole,
            )
            if k:
                delta.top_token_ids.CopyFrom(pack(np.array([[i, *range(k - 1)] for i in part], np.int32)))
                rows = [[-0.25, *[-float("inf")] * (k - 1)] for _ in part]
                delta.top_logprobs.CopyFrom(pack(np.array(rows, np.float32)))
            yield pb.StreamSampleResponse(delta=delta)
            self.sent += 1
            if self.gate is not None:
                await self.gate.wait()
        completion = sampling_pb2.Completion(
            index=index,
            token_ids=pack_ids(ids),
            logprobs=pack_floats(logprobs),
            text=text,
            stop_reason=sampling_pb2.STOP_REASON_END if self.end else sampling_pb2.STOP_REASON_LENGTH,
            seed=sample.params.seed + index,
        )
        if k:
            completion.top_token_ids.CopyFrom(pack(np.array([[i, *range(k - 1)] for i in ids], np.int32)))
            rows = [[-0.25, *[-float("inf")] * (k - 1)] for _ in ids]
            completion.top_logprobs.CopyFrom(pack(np.array(rows, np.float32)))
        if sample.params.return_support:
            completion.support_sizes = pack_ids([2] * len(ids))
            completion.support_token_ids = pack_ids([each for i in ids for each in (i, 0)])
        if sample.model.HasField("policy_version"):
            completion.version_spans.add(start=0, end=len(ids), version=sample.model.policy_version.version)
        yield pb.StreamSampleResponse(completion=completion)

    async def CancelSample(self, request: pb.CancelSampleRequest, context: Any) -> Any:
        self.cancelled.append(request.request_id)
        return pb.CancelSampleResponse()

    async def AckCompletions(self, request: pb.AckCompletionsRequest, context: Any) -> Any:
        self.acknowledged += request.request_ids
        return pb.AckCompletionsResponse()

    async def GetCapabilities(self, request: pb.GetCapabilitiesRequest, context: Any) -> Any:
        digest = hashlib.sha256(b"".join(self.files.values())).hexdigest()
        return pb.GetCapabilitiesResponse(
            base_model=BASE,
            engine="double",
            context_tokens=self.context_tokens,
            sampling_fields=self.fields,
            tokenizer_digest=digest,
        )

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> AsyncIterator[Any]:
        for name, data in self.files.items():
            sha256 = hashlib.sha256(data).hexdigest()
            response = pb.GetTokenizerResponse()
            if not request.sha256s:
                response.files.add(name=name, sha256=sha256, size_bytes=len(data))
            elif sha256 in request.sha256s:
                response.files.add(name=name, sha256=sha256, data=data)
            yield response


@dataclass
class Scheduler(SchedulerServiceServicer, CatalogServiceServicer, AccountServiceServicer):
    """Resolves names to the inference double. `own_job`: the policy's job runs and serves it. `users`: whose
    keys it knows, and their roles.
    """

    address: str = ""
    own_job: bool = True
    attempt: int = 1
    resolved: list[str] = field(default_factory=list)
    created: list[job_pb2.Job] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    renewals: int = 0
    renewals_until_running: int = 2
    deployed: str = "policies/p/versions/3"
    job_error: Reason | None = None
    users: dict[str, "account_pb2.Role.ValueType"] = field(default_factory=dict)

    async def ResolveApiKey(self, request: Any, context: Any) -> Any:
        for key, role in self.users.items():
            if hashlib.sha256(key.encode()).digest() == request.sha256:
                caller = account_service_pb2.GetCallerResponse(
                    caller="users/u", project="projects/p", role=role, api_key="apiKeys/k"
                )
                return account_service_pb2.ResolveApiKeyResponse(caller=caller)
        await abort(context, Reason.UNAUTHENTICATED, "the API key is wrong")

    def endpoint(self) -> job_pb2.Endpoint:
        return job_pb2.Endpoint(
            role=job_pb2.SLOT_ROLE_INFERENCE, server="servers/1", address=self.address, attempt=self.attempt
        )

    async def ResolveModel(self, request: Any, context: Any) -> Any:
        name = request.name
        self.resolved.append(name)
        response = catalog_service_pb2.ResolveModelResponse(base_model=BASE)
        response.slot.role = job_pb2.SLOT_ROLE_INFERENCE
        response.slot.base_model = BASE
        if name in (BASE, f"models/{BASE}"):
            response.model = f"models/{BASE}"
            response.model_ref.base_model = BASE
            return response
        if name in ("mine", "deployments/mine"):
            response.deployment, name = "deployments/mine", self.deployed
        elif name == "policies/p":
            name = "policies/p/versions/3"
        if not name.startswith("policies/p/versions/"):
            await abort(context, Reason.UNKNOWN_MODEL, f"no model {name!r}; there is {BASE}")
        response.model = name
        response.model_ref.policy_version.policy = "policies/p"
        response.model_ref.policy_version.version = int(name.rpartition("/")[2])
        if self.own_job or response.deployment:
            response.endpoints.append(self.endpoint())
            response.job_token = "token-of-the-job"
        return response

    async def ListDeployments(self, request: Any, context: Any) -> Any:
        made = deployment_pb2.Deployment(name="deployments/mine", model=self.deployed, project="default")
        return catalog_service_pb2.ListDeploymentsResponse(deployments=[made])

    async def ListPolicies(self, request: Any, context: Any) -> Any:
        made = policy_pb2.Policy(name="policies/p", latest_version=3, project="default")
        return catalog_service_pb2.ListPoliciesResponse(policies=[made])

    async def GetCluster(self, request: Any, context: Any) -> Any:
        if "authorization" not in dict(context.invocation_metadata()):
            await abort(context, Reason.UNAUTHENTICATED, "no key")
        return scheduler_service_pb2.GetClusterResponse(
            models=[scheduler_service_pb2.ModelInfo(model=BASE, loaded=True)]
        )

    async def CreateJob(self, request: Any, context: Any) -> Any:
        self.created.append(request.job)
        return scheduler_service_pb2.CreateJobResponse(job=job_pb2.Job(name=f"jobs/{len(self.created)}"))

    async def RenewJobLease(self, request: Any, context: Any) -> Any:
        self.renewals += 1
        if self.job_error is not None:
            await abort(context, Reason.INVALID_STATE, "the job has ended")
        response = scheduler_service_pb2.RenewJobLeaseResponse(job=job_pb2.Job(name=request.name))
        if self.renewals >= self.renewals_until_running:
            response.endpoints.append(self.endpoint())
            response.job_token = "token-of-the-gateway"
        return response

    async def GetJob(self, request: Any, context: Any) -> Any:
        job = job_pb2.Job(name=request.name, state=job_pb2.JOB_STATE_FAILED)
        if self.job_error is not None:
            code = CATALOGUE[self.job_error].code
            data = StatusData(code=code, message="no room for the model", reason=self.job_error)
            job.error.CopyFrom(encode(data))
        return scheduler_service_pb2.GetJobResponse(job=job)

    async def FinishJob(self, request: Any, context: Any) -> Any:
        self.finished.append(request.name)
        return scheduler_service_pb2.FinishJobResponse()


async def serve_doubles(scheduler: Scheduler, inference: Inference) -> tuple[grpc.aio.Server, str]:
    """Both behind one port."""
    server = grpc.aio.server()
    add_SchedulerServiceServicer_to_server(scheduler, server)
    add_CatalogServiceServicer_to_server(scheduler, server)
    add_AccountServiceServicer_to_server(scheduler, server)
    add_InferenceServiceServicer_to_server(inference, server)
    scheduler.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    return server, scheduler.address
