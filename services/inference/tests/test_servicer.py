"""What Sample and StreamSample send, whatever the order in which the domain finishes things."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from opentinker_inference.answers import Answers
from opentinker_inference.domain.requests import SampleCall, SampleSpec
from opentinker_inference.domain.sampling import Completion, SampleDone, SamplingParams, StopReason
from opentinker_inference.domain.versions import ModelRef


class NoText:
    """The tokenizer of a model that has none."""

    appends = True

    def text(self, ids: object) -> str:
        return ""

    def is_special(self, token_id: int) -> bool:
        return False

    def is_open(self, token_id: int) -> bool:
        return False


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_completions_that_finish_together_are_all_sent(n: int, streamed: bool) -> None:
    spec = SampleSpec("r", "d", ModelRef(base_model="tiny"), (1, 2), SamplingParams(), True, True, n)
    call = SampleCall(spec, SamplingParams())
    for index in range(n):
        call.add(Completion(index, (5,), (-1.0,), StopReason.LENGTH))
    call.add(SampleDone(0.25))
    call.finish(1.0)
    answers = Answers(call, cast(Any, NoText()), 10, lambda: 0)
    messages = cast(AsyncIterator[Any], answers.streamed() if streamed else answers.whole())
    sent = [message async for message in messages]
    completions = [message for message in sent if message.WhichOneof("event") == "completion"]
    assert [message.completion.index for message in completions] == list(range(n))
    assert [message.HasField("engine_time") for message in completions] == [False] * (n - 1) + [True]
