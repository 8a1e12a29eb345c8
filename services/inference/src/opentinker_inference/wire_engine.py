"""What a server's front and its engine child say to each other, between protos and domain."""

from collections.abc import Iterable
from pathlib import Path

from opentinker_inference import wire, wire_completions
from opentinker_inference.domain.images import Images, PromptImage
from opentinker_inference.domain.sampling import (
    Completion,
    Delta,
    EngineInfo,
    PromptScores,
    SampleDone,
    SampleEvent,
    SampleJob,
    ScoreJob,
)
from opentinker_inference.ports import EngineConfig, Weights
from opentinkerapi.engine.v1 import inference_engine_pb2 as engine_pb2
from opentinkerapi.runtime.tensors import pack_floats, pack_ids, unpack_floats, unpack_ids


def start_pb(config: EngineConfig) -> engine_pb2.StartEngineRequest:
    return engine_pb2.StartEngineRequest(
        engine=config.engine,
        model_dir=str(config.model_dir),
        context_tokens=config.context_tokens,
        dtype=config.dtype,
        serving_mode=config.serving_mode,
        max_resident_versions=config.max_resident_versions,
        max_lora_rank=config.max_lora_rank,
        threads=config.threads,
        kv_cache_bytes=config.kv_cache_bytes,
        max_rows=config.max_rows,
    )


def engine_config(request: engine_pb2.StartEngineRequest) -> EngineConfig:
    return EngineConfig(
        engine=request.engine,
        model_dir=Path(request.model_dir),
        context_tokens=request.context_tokens,
        dtype=request.dtype,
        serving_mode=request.serving_mode,
        max_resident_versions=request.max_resident_versions,
        max_lora_rank=request.max_lora_rank,
        threads=request.threads,
        kv_cache_bytes=request.kv_cache_bytes,
        max_rows=request.max_rows,
    )


def engine_info_pb(info: EngineInfo) -> engine_pb2.StartEngineResponse:
    return engine_pb2.StartEngineResponse(
        engine=info.engine,
        dtype=info.dtype,
        serving_mode=info.serving_mode,
        max_resident_versions=info.max_resident_versions,
        context_tokens=info.context_tokens,
        vocab_size=info.vocab_size,
        deterministic=info.deterministic,
        sampling_fields=info.sampling_fields,
        score_temperature=info.score_temperature,
        pid=info.pid,
        images=info.images,
        continues=info.continues,
    )


def engine_info(response: engine_pb2.StartEngineResponse) -> EngineInfo:
    return EngineInfo(
        engine=response.engine,
        dtype=response.dtype,
        serving_mode=response.serving_mode,
        max_resident_versions=response.max_resident_versions,
        context_tokens=response.context_tokens,
        vocab_size=response.vocab_size,
        deterministic=response.deterministic,
        sampling_fields=tuple(response.sampling_fields),
        score_temperature=response.score_temperature,
        pid=response.pid,
        images=response.images,
        continues=response.continues,
    )


def job_pb(job: SampleJob) -> engine_pb2.EngineSampleRequest:
    return engine_pb2.EngineSampleRequest(
        request_id=job.request_id,
        weights=job.weights,
        prompt_token_ids=pack_ids(job.prompt),
        indices=job.indices,
        params=wire.sampling_params_pb(job.params),
        end_token_ids=job.end_token_ids,
        images=_images_pb(job.images),
        may_continue=job.may_continue,
        stream=job.stream,
    )


def sample_job(request: engine_pb2.EngineSampleRequest) -> SampleJob:
    return SampleJob(
        request_id=request.request_id,
        weights=request.weights,
        prompt=tuple(unpack_ids(request.prompt_token_ids)),
        indices=tuple(request.indices),
        params=wire.sampling_params(request.params),
        end_token_ids=tuple(request.end_token_ids),
        images=_images(request.images),
        may_continue=request.may_continue,
        stream=request.stream,
    )


def _images_pb(images: Images) -> list[engine_pb2.EngineImage]:
    return [
        engine_pb2.EngineImage(start=image.start, token_count=image.token_count, data=image.data)
        for image in images
    ]


def _images(messages: Iterable[engine_pb2.EngineImage]) -> Images:
    return tuple(PromptImage(image.start, image.token_count, image.data) for image in messages)


def event_pb(event: SampleEvent) -> engine_pb2.EngineSampleResponse:
    response = engine_pb2.EngineSampleResponse()
    if isinstance(event, Completion):
        response.completion.CopyFrom(wire_completions.completion_pb(event))
    elif isinstance(event, Delta):
        response.delta.CopyFrom(wire_completions.delta_pb(event))
    elif isinstance(event, PromptScores):
        response.prompt_logprobs.logprobs = pack_floats(event.logprobs)
    else:
        response.done.engine_time.CopyFrom(wire.duration(event.engine_s))
        response.done.cached_prompt_tokens = event.cached_prompt_tokens
    return response


def sample_event(response: engine_pb2.EngineSampleResponse, read: dict[int, int]) -> SampleEvent:
    """An event of one job. `read` counts the tokens of each completion that came before, and is kept here."""
    kind = response.WhichOneof("event")
    if kind == "delta":
        delta = wire_completions.delta(response.delta, read.get(response.delta.index, 0))
        read[delta.index] = delta.start + len(delta.token_ids)
        return delta
    if kind == "completion":
        return wire_completions.completion(response.completion)
    if kind == "prompt_logprobs":
        return PromptScores(tuple(unpack_floats(response.prompt_logprobs.logprobs).tolist()))
    return SampleDone(wire.seconds(response.done.engine_time), response.done.cached_prompt_tokens)


def score_pb(job: ScoreJob) -> engine_pb2.EngineScoreRequest:
    return engine_pb2.EngineScoreRequest(
        request_id=job.request_id,
        weights=job.weights,
        sequences=[pack_ids(sequence) for sequence in job.sequences],
        temperature=job.temperature,
        images=[engine_pb2.EngineImages(images=_images_pb(images)) for images in job.images],
    )


def score_job(request: engine_pb2.EngineScoreRequest) -> ScoreJob:
    return ScoreJob(
        request_id=request.request_id,
        weights=request.weights,
        sequences=tuple(tuple(unpack_ids(sequence)) for sequence in request.sequences),
        temperature=request.temperature,
        images=tuple(_images(each.images) for each in request.images),
    )


def weights_pb(weights: Weights) -> engine_pb2.LoadWeightsRequest:
    directory = str(weights.directory) if weights.directory is not None else ""
    return engine_pb2.LoadWeightsRequest(
        key=weights.key, directory=directory, rank=weights.rank, full=weights.full
    )


def weights(request: engine_pb2.LoadWeightsRequest) -> Weights:
    directory = Path(request.directory) if request.directory else None
    return Weights(request.key, directory, request.rank, request.full)
