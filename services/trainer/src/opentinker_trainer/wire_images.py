"""Chunks of a train sample: token ids, with images between them."""

import numpy as np

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.images import SampleImage
from opentinker_trainer.domain.samples import invalid
from opentinkerapi.data.v1 import train_sample_pb2
from opentinkerapi.runtime.images import ImageSettings
from opentinkerapi.runtime.reasons import Reason

_IDS = np.dtype("<i4")


def chunks_of(
    index: int, message: train_sample_pb2.TrainSample, settings: ImageSettings | None
) -> tuple[bytes, tuple[SampleImage, ...]]:
    """Packed token ids of the sample at `index`, placeholders at the places of its images, and these.

    ServiceError INVALID_SAMPLE; UNSUPPORTED_OPTION for an image where the model takes none.
    """
    runs: list[bytes] = []
    images: list[SampleImage] = []
    length = 0
    for at, chunk in enumerate(message.chunks):
        where = f"chunks[{at}]"
        match chunk.WhichOneof("chunk"):
            case "tokens":
                run = chunk.tokens.token_ids
                if len(run) % _IDS.itemsize:
                    text = f"token_ids has {len(run)} bytes, which is no multiple of 4"
                    raise invalid(index, None, text, where)
            case "image":
                if settings is None:
                    text = f"sample {index} holds an image; the base model takes tokens only"
                    raise ServiceError(
                        Reason.UNSUPPORTED_OPTION, text, field=f"samples[{index}].{where}.image"
                    )
                count = chunk.image.token_count
                if count < 1:
                    text = f"is {count}; an image takes at least 1 place"
                    raise invalid(index, None, text, f"{where}.image.token_count")
                # Before any memory is taken: a few bytes can announce any number of places.
                if length + count > len(message.loss_mask):
                    given = len(message.loss_mask)
                    text = f"loss_mask has {given} entries for at least {length + count} tokens"
                    raise invalid(index, None, text, "loss_mask")
                image = chunk.image.image
                images.append(SampleImage(at, length, count, image.inline, image.media_type))
                run = np.full(count, settings.placeholder, _IDS).tobytes()
            case _:
                raise invalid(index, None, "a chunk is empty", where)
        runs.append(run)
        length += len(run) // _IDS.itemsize
    return b"".join(runs), tuple(images)
