"""A real inference server in this process (its engine in a child), and how tests talk to it."""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from services.inference.tests.adapters_for_tests import sha256, write_adapter

from opentinker_inference.bootstrap import InferenceServer
from opentinker_inference.settings import InferenceSettings
from opentinker_kit.objects import MemoryObjectStore, ObjectStore
from opentinkerapi.data.v1 import prompt_pb2
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import OpenTinkerError, from_rpc_error
from opentinkerapi.runtime.tensors import pack_ids, unpack_floats, unpack_ids


@dataclass
class Reply:
    """Everything one Sample answered."""

    started: sampling_pb2.EffectiveParams = field(default_factory=sampling_pb2.EffectiveParams)
    completions: dict[int, sampling_pb2.Completion] = field(default_factory=dict)
    prompt_logprobs: list[float] = field(default_factory=list)
    keep_alives: int = 0
    engine_s: float = 0.0

    def ids(self, index: int = 0) -> tuple[int, ...]:
        return tuple(unpack_ids(self.completions[index].token_ids))

    def logprobs(self, index: int = 0) -> list[float]:
        return [float(x) for x in unpack_floats(self.completions[index].logprobs)]

    def outcome(self) -> dict[int, tuple[bytes, bytes]]:
        return {i: (c.token_ids, c.logprobs) for i, c in sorted(self.completions.items())}


@dataclass
class Streamed(Reply):
    """Everything one StreamSample answered."""

    deltas: list[sampling_pb2.CompletionDelta] = field(default_factory=list)

    def joined(self, index: int = 0) -> sampling_pb2.CompletionDelta:
        """The deltas of one completion as one."""
        own = [delta for delta in self.deltas if delta.index == index]
        return sampling_pb2.CompletionDelta(
            index=index,
            token_ids=b"".join(delta.token_ids for delta in own),
            logprobs=b"".join(delta.logprobs for delta in own),
            text="".join(delta.text for delta in own),
            version_spans=[span for delta in own for span in delta.version_spans],
        )


class Client:
    """The stub with typed errors, and requests in short."""

    def __init__(
        self,
        server: InferenceServer,
        channel: grpc.aio.Channel,
        base_model: str,
        objects: ObjectStore,
        name: str = "p1",
    ) -> None:
        """`name` keeps apart what several tests do on one server: request ids and the policy carry it."""
        self.server = server
        self.channel = channel
        self.stub = InferenceServiceStub(channel)
        self.base_model = base_model
        self.objects = objects
        self.name = name
        self.policy = f"policies/{name}"

    def named(self, name: str) -> "Client":
        return Client(self.server, self.channel, self.base_model, self.objects, name)

    def request(
        self,
        request_id: str,
        prompt: bytes | tuple[int, ...] = b"2 + 2 = ",
        *,
        version: int | None = None,
        policy: str = "",
        n: int = 1,
        **params: object,
    ) -> pb.SampleRequest:
        params.setdefault("max_tokens", 8)
        if version is None:
            model = sampling_pb2.ModelRef(base_model=self.base_model)
        else:
            ref = sampling_pb2.PolicyVersionRef(policy=policy or self.policy, version=version)
            model = sampling_pb2.ModelRef(policy_version=ref)
        return pb.SampleRequest(
            request_id=self.id(request_id),
            model=model,
            prompt=prompt_of(prompt),
            params=sampling_pb2.SamplingParams(**params),  # type: ignore[arg-type]
            n=n,
        )

    def id(self, request_id: str) -> str:
        return f"{self.name}/{request_id}"

    async def send(self, request: pb.SampleRequest) -> Reply:
        reply = Reply()
        try:
            async for response in self.stub.Sample(request):
                kind = response.WhichOneof("event")
                if kind == "started":
                    reply.started.CopyFrom(response.started)
                elif kind == "completion":
                    assert response.completion.index not in reply.completions
                    reply.completions[response.completion.index] = response.completion
                    reply.engine_s = response.engine_time.ToNanoseconds() / 1e9
                elif kind == "prompt_logprobs":
                    reply.prompt_logprobs = unpack_floats(response.prompt_logprobs.logprobs).tolist()
                else:
                    reply.keep_alives += 1
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return reply

    async def stream(self, request: pb.SampleRequest, timeout_s: float | None = None) -> Streamed:
        """Read a StreamSample to its end; a completion may come only after its last delta."""
        reply = Streamed()
        try:
            call = self.stub.StreamSample(pb.StreamSampleRequest(sample=request), timeout=timeout_s)
            async for response in call:
                kind = response.WhichOneof("event")
                if kind == "started":
                    reply.started.CopyFrom(response.started)
                elif kind == "delta":
                    assert response.delta.index not in reply.completions
                    assert response.delta.token_ids or response.delta.text
                    reply.deltas.append(response.delta)
                elif kind == "completion":
                    assert response.completion.index not in reply.completions
                    reply.completions[response.completion.index] = response.completion
                    reply.engine_s = response.engine_time.ToNanoseconds() / 1e9
                elif kind == "prompt_logprobs":
                    assert not reply.deltas
                    reply.prompt_logprobs = unpack_floats(response.prompt_logprobs.logprobs).tolist()
                else:
                    reply.keep_alives += 1
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return reply

    async def sample(self, request_id: str, *args: object, **options: object) -> Reply:
        return await self.send(self.request(request_id, *args, **options))  # type: ignore[arg-type]

    async def failure(self, request: pb.SampleRequest) -> OpenTinkerError:
        try:
            await self.send(request)
        except OpenTinkerError as error:
            return error
        raise AssertionError("the request succeeded")


def prompt_of(tokens: bytes | tuple[int, ...]) -> prompt_pb2.Prompt:
    ids = prompt_pb2.TokenChunk(token_ids=pack_ids(list(tokens)))
    return prompt_pb2.Prompt(chunks=[prompt_pb2.Chunk(tokens=ids)])


@contextlib.asynccontextmanager
async def serving(
    model_dir: Path,
    state_dir: Path,
    *,
    objects: ObjectStore | None = None,
    base_model: str = "",
    engine: str = "transformers",
    **settings: object,
) -> AsyncIterator[Client]:
    """Start a server, wait until its engine runs, end it."""
    name = base_model or str(model_dir)
    store = objects if objects is not None else MemoryObjectStore()
    server = InferenceServer(
        InferenceSettings(
            base_model=name,
            engine=engine,
            allow_any_model_dir=True,
            model_cache_dir=state_dir / "models",
            state_dir=state_dir,
            drain_s=1.0,
            **settings,  # type: ignore[arg-type]
        ),
        objects=store,
    )
    port = await server.start()
    try:
        await server.engine.wait_started()
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield Client(server, channel, name, store)
    finally:
        await server.close()


async def publish(
    objects: ObjectStore,
    policy: str,
    version: int,
    directory: Path | None,
    *,
    local: bool = False,
    upload: bool = True,
    facts: dict[str, object] | None = None,
) -> None:
    """Do what a trainer does: files, then the manifest. Without a directory the version is the base."""
    key = f"{policy}/versions/{version}"
    files = []
    for path in sorted(directory.iterdir()) if directory else ():
        files.append({"name": path.name, "sha256": sha256(path), "size_bytes": path.stat().st_size})
        if upload:
            await objects.put(f"{key}/{path.name}", path.read_bytes())
    manifest: dict[str, object] = {
        "policy": policy,
        "version": version,
        "kind": "lora" if directory else "base",
        "files": files,
    }
    if local:
        manifest["local_path"] = str(directory)
    assert await objects.put_if_absent(f"{key}/manifest.json", json.dumps(manifest | (facts or {})).encode())


async def publish_random(
    objects: ObjectStore, policy: str, version: int, model_dir: Path, work_dir: Path, **adapter: object
) -> Path:
    """Publish a random adapter; returns its directory."""
    path = work_dir / policy / str(version)
    write_adapter(path, model_dir, seed=version, **adapter)  # type: ignore[arg-type]
    await publish(objects, policy, version, path)
    return path
