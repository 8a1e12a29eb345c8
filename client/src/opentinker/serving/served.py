"""A model by its name, and replies of it. What the name stands for, and who serves it, is asked anew for each
request: a deployment may be promoted between two of them.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentinker import errors
from opentinker.connection.calls import PAUSE_S, answer, stream
from opentinker.connection.jobs import Job, Link, Role
from opentinker.connection.portal import Pending
from opentinker.connection.tokenizers import fetch_tokenizer
from opentinker.environments.content import Message
from opentinker.rollout.renderer import Renderer
from opentinker.sampling.params import SamplingParams
from opentinker.sampling.prompt import chunks, upload_large
from opentinkerapi.catalog.v1 import catalog_service_pb2
from opentinkerapi.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from opentinkerapi.data.v1 import prompt_pb2
from opentinkerapi.inference.v1 import inference_service_pb2, sampling_pb2
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.scheduler.v1 import job_pb2

if TYPE_CHECKING:
    from opentinker.connection.cluster import Cluster

Messages = str | Sequence[Message | Mapping[str, Any]]

MAX_CRASHES = 3
"""How often a server may die under one request before the request is to blame."""
OTHER_POLICY_S = 60.0
"""How long a merged server may be busy with another policy, as just after a promotion."""


class ServedModel:
    """A model that is served under a name: a deployment, a policy, one of its versions or checkpoints, or a
    base model. For what is no deployment a job of this client takes an inference slot at the first
    request.
    """

    def __init__(self, cluster: "Cluster", name: str) -> None:
        self.name = name
        self._cluster = cluster
        self._job: Job | None = None
        self._owned = False
        self._conversation = f"served-{uuid.uuid4().hex}"
        self._finding = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<ServedModel {self.name}>"

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, seed: int | None = None
    ) -> Pending[str]:
        """The reply to a conversation, or to one user message."""

        async def reply() -> str:
            return "".join([part async for part in self._reply(messages, params, seed)])

        return Pending.of(self._cluster.portal, reply())

    async def stream(
        self, messages: Messages, params: SamplingParams | None = None, *, seed: int | None = None
    ) -> AsyncGenerator[str, None]:
        """The reply as it is written, in whole characters. From any event loop."""
        async for part in self._cluster.portal.relay(self._reply(messages, params, seed)):
            yield part

    # --- on the client's loop -----------------------------------------------------------------------------

    async def resolve(self) -> catalog_service_pb2.ResolveModelResponse:
        """What the name stands for now."""
        request = catalog_service_pb2.ResolveModelRequest(name=self.name)
        return await self._cluster.control.call(
            lambda channel: CatalogServiceStub(channel).ResolveModel(request)
        )

    async def probe(self, ref: sampling_pb2.ModelRef | None = None) -> None:
        """Wait until every server of it answers with its weights, or with others that it shall have.

        Raises what is wrong with the weights.
        """
        job, now = await self._way()
        model = ref or now

        async def one(link: Link) -> None:
            await _probe(link, model)

        await job.everywhere(Role.INFERENCE, one)

    async def close(self) -> None:
        """Stop this client's part in it; a deployment goes on."""
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._job is not None and not self._owned:
            await self._job.close()

    async def _way(self) -> tuple[Job, sampling_pb2.ModelRef]:
        """The job whose servers answer now, and which weights to ask for."""
        async with self._finding:
            found = await self.resolve()
            if self._job is None:
                self._cluster.served.append(self)
            if found.deployment:
                if self._job is None or self._job.name != found.job:
                    if self._job is not None:
                        await self._job.close()
                    # The job lives without this client; asking for its lease says where its servers are.
                    self._job = Job(self._cluster.control, found.job, roles=(Role.INFERENCE,))
            elif self._job is None:
                spec = job_pb2.Job(
                    display_name=f"serving {self.name}",
                    kind=job_pb2.JOB_KIND_INFERENCE,
                    slots=[found.slot],
                    on_client_loss=job_pb2.ON_CLIENT_LOSS_CANCEL,
                )
                self._job, self._owned = await self._cluster.open_job(spec), True
            return self._job, found.model_ref

    async def _reply(
        self, messages: Messages, params: SamplingParams | None, seed: int | None
    ) -> AsyncGenerator[str, None]:
        params = params or SamplingParams()
        params.check_tokens_only("params")
        job, ref = await self._way()
        spoken = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        renderer = Renderer(await fetch_tokenizer(job))
        prompt = renderer.first([Message.of(message) for message in spoken])
        request = inference_service_pb2.SampleRequest(
            request_id=f"chat-{uuid.uuid4().hex}",
            model=ref,
            prompt=prompt_pb2.Prompt(chunks=chunks(prompt, prompt.images)),
            params=params.to_wire(seed),
            n=1,
            conversation=self._conversation,
        )
        await upload_large(request.prompt.chunks, self._cluster.blobs)
        async for part in self._text(job, request):
            yield part

    async def _text(
        self, job: Job, request: inference_service_pb2.SampleRequest
    ) -> AsyncGenerator[str, None]:
        """The text of one completion. Sent again where its server is lost: what had come is left out then."""
        given, crashes, give_up = 0, 0, time.monotonic() + OTHER_POLICY_S
        link: Link | None = None
        done = False
        try:
            while not done:
                failure: errors.OpenTinkerError | None = None
                said = 0
                async with job.routed(Role.INFERENCE, self._conversation) as link:
                    request.attempt, request.job_token = link.attempt, link.job_token
                    call = InferenceServiceStub(link.channel).StreamSample(
                        inference_service_pb2.StreamSampleRequest(sample=request)
                    )
                    try:
                        async for response in stream(call):
                            text = response.delta.text
                            said += len(text)
                            if said > given:
                                part, given = text[len(text) - (said - given) :], said
                                yield part
                            done = done or response.HasField("completion")
                        if not done:
                            failure = errors.Unavailable(
                                "a stream ended before its completion", reason=errors.Reason.CONNECTION_LOST
                            )
                    except (errors.Unavailable, errors.StaleAttempt) as error:
                        failure = error
                    except errors.FailedPrecondition as error:
                        if error.reason != errors.Reason.MERGED_ONE_VERSION or time.monotonic() > give_up:
                            raise
                        await asyncio.sleep(PAUSE_S)
                    except errors.Overloaded as error:
                        await asyncio.sleep(error.retry_after_s or PAUSE_S)
                    finally:
                        call.cancel()
                if failure is not None:
                    crashes += 1
                    if crashes > MAX_CRASHES:
                        raise failure
                    await job.recover(link, failure)
            job.answered(link)
        finally:
            if link is not None:
                self._later(_acknowledge(link, request) if done else _cancel(link, request))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _probe(link: Link, model: sampling_pb2.ModelRef) -> None:
    """One token of a model."""
    request = inference_service_pb2.SampleRequest(
        request_id=f"probe-{uuid.uuid4().hex}",
        model=model,
        prompt=prompt_pb2.Prompt(chunks=chunks([0], ())),
        params=sampling_pb2.SamplingParams(max_tokens=1),
        attempt=link.attempt,
        job_token=link.job_token,
    )
    async for _ in stream(InferenceServiceStub(link.channel).Sample(request)):
        pass
    await _acknowledge(link, request)


async def _acknowledge(link: Link, request: inference_service_pb2.SampleRequest) -> None:
    done = inference_service_pb2.AckCompletionsRequest(
        request_ids=[request.request_id], job_token=link.job_token
    )
    with contextlib.suppress(errors.OpenTinkerError):
        await answer(InferenceServiceStub(link.channel).AckCompletions(done, timeout=5))


async def _cancel(link: Link, request: inference_service_pb2.SampleRequest) -> None:
    cancel = inference_service_pb2.CancelSampleRequest(
        request_id=request.request_id, job_token=link.job_token
    )
    with contextlib.suppress(errors.OpenTinkerError):
        await answer(InferenceServiceStub(link.channel).CancelSample(cancel, timeout=5))
