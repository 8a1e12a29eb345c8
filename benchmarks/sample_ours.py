"""Our side of the sampling benchmarks: a whole inference server, and a client that speaks the wire to it.

The server is the real one, front and engine child; what is measured is from the first byte of the first
request to the last completion. `python -m benchmarks.sample_ours …` does the `sample_work.Work` of each line
of its input.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.sample_work import MODEL, Work, first_tokens
from opentinker_inference.bootstrap import InferenceServer
from opentinker_inference.settings import InferenceSettings
from opentinker_kit.objects import MemoryObjectStore
from opentinkerapi.data.v1 import prompt_pb2
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1 import inference_service_pb2_grpc, sampling_pb2
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.tensors import pack_ids, unpack_ids


class Client:
    """Sends the requests of a piece of work all at once, to a model (default: the bare base)."""

    def __init__(self, stub: Any, model: sampling_pb2.ModelRef | None = None) -> None:
        self._stub = stub
        self._model = model or sampling_pb2.ModelRef(base_model=MODEL)

    async def completions(self, work: Work) -> list[sampling_pb2.Completion]:
        """The first completion of each request."""
        requests = [self._request(work, number) for number in range(work.requests)]
        found: list[sampling_pb2.Completion] = []
        for request in requests:
            async for response in self._stub.Sample(request):
                if response.WhichOneof("event") == "completion" and response.completion.index == 0:
                    found.append(response.completion)
        return found

    async def run(self, work: Work) -> dict[str, float]:
        requests = [self._request(work, number) for number in range(work.requests)]
        ask = self._stream if work.stream else self._sample
        begin = time.perf_counter()
        waited = await asyncio.gather(*(ask(request, work) for request in requests))
        answer = {"seconds": time.perf_counter() - begin}
        names = [request.request_id for request in requests]
        await self._stub.AckCompletions(pb.AckCompletionsRequest(request_ids=names))
        return answer | (first_tokens([each for one in waited for each in one]) if work.stream else {})

    def _request(self, work: Work, number: int) -> pb.SampleRequest:
        tokens = prompt_pb2.TokenChunk(token_ids=pack_ids(work.prompt(number)))
        return pb.SampleRequest(
            request_id=f"{work.line()}/{number}",
            model=self._model,
            prompt=prompt_pb2.Prompt(chunks=[prompt_pb2.Chunk(tokens=tokens)]),
            params=sampling_pb2.SamplingParams(
                max_tokens=work.new_tokens, seed=work.seed(number), ignore_eos=True
            ),
            n=work.n,
        )

    async def _sample(self, request: pb.SampleRequest, work: Work) -> list[float]:
        done = 0
        async for response in self._stub.Sample(request):
            if response.WhichOneof("event") == "completion":
                done += 1
                _check(response.completion, work)
        if done != work.n:
            raise RuntimeError(f"{done} of {work.n} completions came")
        return []

    async def _stream(self, request: pb.SampleRequest, work: Work) -> list[float]:
        """Seconds to the first token of each completion."""
        begin = time.perf_counter()
        first: dict[int, float] = {}
        async for response in self._stub.StreamSample(pb.StreamSampleRequest(sample=request)):
            kind = response.WhichOneof("event")
            if kind == "delta" and response.delta.token_ids:
                first.setdefault(response.delta.index, time.perf_counter() - begin)
            elif kind == "completion":
                _check(response.completion, work)
        if len(first) != work.n:
            raise RuntimeError(f"{len(first)} of {work.n} completions began")
        return list(first.values())


def _check(completion: sampling_pb2.Completion, work: Work) -> None:
    count = len(unpack_ids(completion.token_ids))
    if count != work.new_tokens:
        raise RuntimeError(f"a completion has {count} tokens instead of {work.new_tokens}")


async def serve(arguments: argparse.Namespace, directory: Path) -> None:
    """Start everything, then a piece of work for each line."""
    settings = InferenceSettings(
        base_model=MODEL,
        engine=arguments.engine,
        dtype=arguments.dtype,
        context_tokens=arguments.context_tokens,
        state_dir=directory,
        **json.loads(arguments.settings),
    )
    server = InferenceServer(settings, objects=MemoryObjectStore())
    port = await server.start()
    await server.engine.wait_started()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        client = Client(inference_service_pb2_grpc.InferenceServiceStub(channel))
        answer: dict[str, Any] = {"ready": True}
        while True:
            print(json.dumps(answer), flush=True)
            line = await asyncio.to_thread(sys.stdin.readline)
            if not line:
                break
            answer = await client.run(Work.of_line(line))
    await server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--context-tokens", type=int, default=1024)
    parser.add_argument("--settings", default="{}", help="further settings of the server, JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ot-bench-") as directory:
        asyncio.run(serve(arguments, Path(directory)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
