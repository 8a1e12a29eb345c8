"""What Sample sends, whatever the order in which the domain finishes things."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from opentinker_inference.domain.requests import SampleCall, SampleSpec
from opentinker_inference.domain.sampling import Completion, SampleDone, SamplingParams, StopReason
from opentinker_inference.domain.versions import ModelRef
from opentinker_inference.prompts import PromptReader
from opentinker_inference.servicer import InferenceServicer
from opentinkerapi.data.v1 import prompt_pb2
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.runtime.tensors import pack_ids


@pytest.mark.parametrize("n", [1, 3])
async def test_completions_that_finish_together_are_all_sent(n: int) -> None:
    spec = SampleSpec("r", "d", ModelRef(base_model="tiny"), (1, 2), SamplingParams(), True, True, n)
    call = SampleCall(spec, SamplingParams())
    for index in range(n):
        call.add(Completion(index, (5,), (-1.0,), StopReason.LENGTH))
    call.add(SampleDone(0.25))
    call.finish(1.0)
    domain = SimpleNamespace(check_attempt=lambda attempt: None, submit=lambda spec: call)
    tokenizer = SimpleNamespace(text=lambda ids: "x")
    prompts = PromptReader(None, None, lambda: cast(Any, None))
    servicer = InferenceServicer(cast(Any, domain), cast(Any, tokenizer), prompts, "", 10)
    request = pb.SampleRequest(
        request_id="r",
        model=sampling_pb2.ModelRef(base_model="tiny"),
        prompt=prompt_pb2.Prompt(
            chunks=[prompt_pb2.Chunk(tokens=prompt_pb2.TokenChunk(token_ids=pack_ids([1, 2])))]
        ),
    )
    sent = [response async for response in servicer.Sample(request, cast(Any, None))]
    completions = [response for response in sent if response.WhichOneof("event") == "completion"]
    assert [response.completion.index for response in completions] == list(range(n))
    assert [response.HasField("engine_time") for response in completions] == [False] * (n - 1) + [True]
