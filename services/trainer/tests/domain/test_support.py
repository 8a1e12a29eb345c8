"""B52: what each token was chosen among reaches the trainer, or is refused by field."""

from dataclasses import replace

import numpy as np
import pytest

from opentinker_kit.errors import ServiceError
from opentinker_trainer import wire
from opentinker_trainer.domain.losses import Component, Ppo
from opentinker_trainer.domain.samples import Limits, Sample, check_samples
from opentinker_trainer.domain.support import MAX_SUPPORT, Support
from opentinkerapi.data.v1 import prompt_pb2, train_sample_pb2
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import pack_ids

LIMITS = Limits(vocab_size=300, max_sequence_tokens=64)
IDS = [5, 6, 7, 8]
MASK = [0, 0, 1, 1]


def row(sizes: list[int], ids: list[int]) -> Sample:
    """Four tokens, the last two trained on."""
    return Sample(
        np.array(IDS, np.int32),
        np.array(MASK, np.bool_),
        support=Support(np.array(sizes, np.int32), np.array(ids, np.int32)),
    )


@pytest.mark.parametrize(
    ("sizes", "ids", "field", "text"),
    [
        ([0, 0, 1], [7], "support_sizes", "3 entries for 4 tokens"),
        ([0, 0, -1, 0], [], "support_sizes", "more than 256 ids"),
        ([0, 0, -2, 0], [], "support_sizes", "support_sizes[2] is -2"),
        ([0, 0, MAX_SUPPORT + 1, 0], list(range(MAX_SUPPORT + 1)), "support_sizes", "at most 256"),
        ([0, 0, 2, 0], [7], "support_token_ids", "1 ids where support_sizes adds up to 2"),
        ([0, 0, 1, 1], [7, 8, 9], "support_token_ids", "3 ids where support_sizes adds up to 2"),
        ([0, 0, 2, 0], [7, 300], "support_token_ids", "id 300"),
        ([0, 0, 2, 0], [7, -1], "support_token_ids", "id -1"),
        ([0, 0, 3, 0], [7, 9, 9], "support_token_ids", "twice"),
        ([0, 0, 2, 2], [7, 8, 7, 9], "support_token_ids", "token 3 is id 8"),
    ],
    ids=str,
)
def test_a_malformed_support_is_refused_by_field(
    sizes: list[int], ids: list[int], field: str, text: str
) -> None:
    good = row([0, 0, 1, 2], [7, 8, 9])
    for components in (None, [Component("main", Ppo(), 1.0)]):
        filled = [_filled(each) for each in (good, row(sizes, ids))]
        with pytest.raises(ServiceError) as error:
            check_samples(filled, LIMITS, components)
        assert error.value.reason == Reason.INVALID_SAMPLE
        assert error.value.field == f"samples[1].{field}"
        assert text in error.value.message


def _filled(each: Sample) -> Sample:
    zeros = np.zeros(4, np.float32)
    return replace(each, behavior_logprobs=zeros, advantages=zeros)


def test_where_nobody_trains_a_support_may_be_anything() -> None:
    check_samples([row([-1, 2, 1, 2], [999, 999, 7, 8, 9])], LIMITS)


def test_a_support_is_read_from_the_message() -> None:
    message = train_sample_pb2.TrainSample(
        chunks=[prompt_pb2.Chunk(tokens=prompt_pb2.TokenChunk(token_ids=pack_ids(IDS)))],
        loss_mask=bytes(MASK),
        support_sizes=pack_ids([0, -1, 1, 2]),
        support_token_ids=pack_ids([7, 8, 9]),
    )
    (found,) = wire.samples_of([message])
    assert found.support is not None
    assert found.support.sizes.tolist() == [0, -1, 1, 2]
    assert found.support.ids.tolist() == [7, 8, 9]
    for name in ("support_sizes", "support_token_ids"):
        torn = train_sample_pb2.TrainSample()
        torn.CopyFrom(message)
        setattr(torn, name, getattr(torn, name)[:-1])
        with pytest.raises(ServiceError) as error:
            wire.samples_of([message, torn])
        assert error.value.field == f"samples[1].{name}"
    message.ClearField("support_sizes")
    with pytest.raises(ServiceError, match="0 entries"):
        check_samples(wire.samples_of([message]), LIMITS)
