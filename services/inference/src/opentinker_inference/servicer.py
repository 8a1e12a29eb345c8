"""InferenceService on the wire: one short method for each RPC."""

from collections.abc import AsyncIterator, Mapping

import grpc.aio

from opentinker_inference import wire
from opentinker_inference.adapters.tokenizer import ModelTokenizer
from opentinker_inference.answers import Answers
from opentinker_inference.domain.requests import OWNER
from opentinker_inference.domain.service import InferenceDomain
from opentinker_inference.domain.versions import ModelRef
from opentinker_inference.prompts import PromptReader
from opentinker_kit.accounts import Gate
from opentinker_kit.auth import Access, acting_attempt, acting_job, acting_project
from opentinker_kit.errors import ServiceError
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceServicer
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import pack_floats, pack_ids

SERVICE = "opentinkerapi.inference.v1.InferenceService"
METHODS = (
    "Sample",
    "StreamSample",
    "ScoreTokens",
    "CancelSample",
    "AckCompletions",
    "LoadPolicyVersion",
    "UnloadPolicyVersion",
    "ListModels",
    "GetTokenizer",
    "RenderChat",
    "Tokenize",
    "Detokenize",
    "GetCapabilities",
)
_OF_THE_SERVER = ("GetTokenizer", "RenderChat", "Tokenize", "Detokenize", "GetCapabilities")
"""What is asked about the server and its base model, for no job."""
ACCESS: Mapping[str, Access] = {
    f"/{SERVICE}/{name}": Access.CALLER if name in _OF_THE_SERVER else Access.JOB for name in METHODS
}
_MODES = {"adapter": pb.SERVING_MODE_ADAPTER, "merged": pb.SERVING_MODE_MERGED}
_SWAP_POLICIES = (sampling_pb2.SWAP_POLICY_DRAIN, sampling_pb2.SWAP_POLICY_CONTINUE)

Context = grpc.aio.ServicerContext[object, object]


class InferenceServicer(InferenceServiceServicer):
    """Wire to domain to wire."""

    def __init__(
        self,
        domain: InferenceDomain,
        tokenizer: ModelTokenizer,
        prompts: PromptReader,
        base_digest: str,
        keep_alive_s: float,
        gate: Gate,
    ) -> None:
        self._domain = domain
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._base_digest = base_digest
        self._keep_alive_s = keep_alive_s
        self._gate = gate

    async def Sample(  # type: ignore[override]
        self, request: pb.SampleRequest, context: Context
    ) -> AsyncIterator[pb.SampleResponse]:
        async for response in (await self._answers(request, context)).whole():
            yield response

    async def StreamSample(  # type: ignore[override]
        self, request: pb.StreamSampleRequest, context: Context
    ) -> AsyncIterator[pb.StreamSampleResponse]:
        async for response in (await self._answers(request.sample, context, stream=True)).streamed():
            yield response

    async def ScoreTokens(  # type: ignore[override]
        self, request: pb.ScoreTokensRequest, context: Context
    ) -> pb.ScoreTokensResponse:
        self._domain.leases.check(request.attempt, acting_job(), acting_attempt())
        model = wire.model_ref(request.model)
        await self._check_own(model, "model")
        sequences = [
            await self._prompts.read(sequence, f"sequences[{index}]", acting_project())
            for index, sequence in enumerate(request.sequences)
        ]
        temperature = request.temperature if request.HasField("temperature") else 1.0
        scores = await self._domain.score(
            model,
            tuple(sequence.ids for sequence in sequences),
            temperature,
            tuple(sequence.images for sequence in sequences) if any(s.images for s in sequences) else (),
        )
        return pb.ScoreTokensResponse(scores=[pb.TokenScores(logprobs=pack_floats(one)) for one in scores])

    async def CancelSample(  # type: ignore[override]
        self, request: pb.CancelSampleRequest, context: Context
    ) -> pb.CancelSampleResponse:
        self._domain.cancel(_own(request.request_id))
        return pb.CancelSampleResponse()

    async def AckCompletions(  # type: ignore[override]
        self, request: pb.AckCompletionsRequest, context: Context
    ) -> pb.AckCompletionsResponse:
        self._domain.book.acknowledge(map(_own, request.request_ids))
        return pb.AckCompletionsResponse()

    async def LoadPolicyVersion(  # type: ignore[override]
        self, request: pb.LoadPolicyVersionRequest, context: Context
    ) -> pb.LoadPolicyVersionResponse:
        self._domain.leases.check(0, acting_job(), acting_attempt())
        version = wire.version_ref(request.policy_version)
        await self._check_own(version, "policy_version")
        elapsed = await self._domain.load_version(
            version, may_continue=wire.may_continue(request.swap_policy)
        )
        return pb.LoadPolicyVersionResponse(load_time=wire.duration(elapsed))

    async def UnloadPolicyVersion(  # type: ignore[override]
        self, request: pb.UnloadPolicyVersionRequest, context: Context
    ) -> pb.UnloadPolicyVersionResponse:
        version = wire.version_ref(request.policy_version)
        await self._check_own(version, "policy_version")
        await self._domain.unload_version(version)
        return pb.UnloadPolicyVersionResponse()

    async def ListModels(  # type: ignore[override]
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        models = [
            pb.LoadedModel(model=wire.model_ref_pb(ref, self._domain.base_model), running_requests=users)
            for ref, users in self._domain.residency.loaded()
            if ref.is_base or await self._gate.owns(ref.policy)
        ]
        return pb.ListModelsResponse(models=models)

    async def GetTokenizer(  # type: ignore[override]
        self, request: pb.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        digest = self._tokenizer.files.digest
        if not request.sha256s:
            yield pb.GetTokenizerResponse(digest=digest, files=self._tokenizer.files.listing())
            return
        for run in self._tokenizer.files.runs(request.sha256s):
            yield pb.GetTokenizerResponse(digest=digest, files=[run])

    async def RenderChat(  # type: ignore[override]
        self, request: pb.RenderChatRequest, context: Context
    ) -> pb.RenderChatResponse:
        messages = [wire.chat_message(m, f"messages[{i}]") for i, m in enumerate(request.messages)]
        tools = [wire.tool_spec(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
        prompt = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
        return pb.RenderChatResponse(
            token_ids=pack_ids(self._tokenizer.render(messages, tools or None, prompt))
        )

    async def Tokenize(  # type: ignore[override]
        self, request: pb.TokenizeRequest, context: Context
    ) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=pack_ids(self._tokenizer.encode(request.text)))

    async def Detokenize(  # type: ignore[override]
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        ids = wire.token_ids(request.token_ids, "token_ids")
        return pb.DetokenizeResponse(text=self._tokenizer.decode(ids, request.keep_special_tokens))

    async def GetCapabilities(  # type: ignore[override]
        self, request: pb.GetCapabilitiesRequest, context: Context
    ) -> pb.GetCapabilitiesResponse:
        info = self._domain.info
        return pb.GetCapabilitiesResponse(
            base_model=self._domain.base_model,
            base_digest=self._base_digest,
            engine=info.engine,
            serving_mode=_MODES[info.serving_mode],
            max_resident_versions=info.max_resident_versions,
            context_tokens=info.context_tokens,
            dtype=info.dtype,
            deterministic=info.deterministic,
            sampling_fields=sorted({*info.sampling_fields, "include_stop_in_output"}),
            methods=METHODS,
            tokenizer_digest=self._tokenizer.files.digest,
            end_token_ids=self._domain.end_token_ids,
            raw_logprobs="raw_logprobs" in info.sampling_fields,
            images=info.images,
            swap_policies=_SWAP_POLICIES if info.continues else (),
        )

    async def _answers(self, request: pb.SampleRequest, context: Context, *, stream: bool = False) -> Answers:
        self._domain.leases.check(request.attempt, acting_job(), acting_attempt())
        await self._check_own(wire.model_ref(request.model), "model")
        prompt = await self._prompts.read(request.prompt, "prompt", acting_project())
        spec = wire.sample_spec(request, prompt, _own(request.request_id), stream=stream)
        call = self._domain.submit(spec, within_s=context.time_remaining())
        return Answers(call, self._tokenizer, self._keep_alive_s, self._domain.queued)

    async def _check_own(self, ref: ModelRef, field: str) -> None:
        """VERSION_NOT_FOUND or CHECKPOINT_NOT_FOUND for weights of another project."""
        if ref.is_base or await self._gate.owns(ref.policy):
            return
        reason = Reason.CHECKPOINT_NOT_FOUND if ref.checkpoint else Reason.VERSION_NOT_FOUND
        raise ServiceError(reason, f"there is no {ref}", field=field)


def _own(request_id: str) -> str:
    """A request's id among those of all jobs: one job cannot name another's requests."""
    job = acting_job()
    return f"{job}{OWNER}{request_id}" if job else request_id
