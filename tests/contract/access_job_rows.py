"""The access matrix: rows of the servers that work for jobs."""

import uuid
from collections.abc import Mapping
from typing import Any

from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.data.v1 import content_pb2, loss_pb2, prompt_pb2
from opentinkerapi.env.v1 import capabilities_pb2, environment_pb2, package_pb2, snapshot_pb2
from opentinkerapi.env.v1 import env_host_service_pb2 as env
from opentinkerapi.inference.v1 import inference_service_pb2 as inference
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.runtime.tensors import pack_ids
from opentinkerapi.trainer.v1 import operation_pb2
from opentinkerapi.trainer.v1 import trainer_service_pb2 as trainer
from tests.contract.access_rows import JOB, MEMBER, VIEWER, Row, named
from tests.contract.access_world import World


def _id() -> str:
    return uuid.uuid4().hex


def _trainer(w: World) -> dict[str, Any]:
    header = operation_pb2.OperationHeader(policy=w.policy, seq=99, request_id=_id(), attempt=w.attempt)
    return {"header": header}


def _ref(w: World) -> sampling_pb2.PolicyVersionRef:
    return sampling_pb2.PolicyVersionRef(policy=w.policy, version=0)


def _prompt() -> prompt_pb2.Prompt:
    tokens = prompt_pb2.TokenChunk(token_ids=pack_ids([1, 2]))
    return prompt_pb2.Prompt(chunks=[prompt_pb2.Chunk(tokens=tokens)])


def _sample(w: World) -> inference.SampleRequest:
    params = sampling_pb2.SamplingParams(max_tokens=1)
    model = sampling_pb2.ModelRef(policy_version=_ref(w))
    return inference.SampleRequest(request_id=_id(), model=model, prompt=_prompt(), params=params)


def _create_policy(w: World) -> trainer.CreatePolicyRequest:
    tuning = policy_pb2.Tuning(lora=policy_pb2.LoraTuning(rank=4))
    return trainer.CreatePolicyRequest(
        request_id=_id(), job=w.job, attempt=w.attempt, base_model=w.model, tuning=tuning
    )


def _step(w: World) -> env.StepRequest:
    action = environment_pb2.AgentAction(agent="agent")
    action.action.content.parts.add(text="1")
    return env.StepRequest(episode=w.episode, seq=7, actions=[action])


def _drive(w: World) -> env.DriveRequest:
    return env.DriveRequest(calls=[env.DriveCall(begin=env.BeginRequest(episode=w.episode))])


def _chat(w: World) -> inference.RenderChatRequest:
    return inference.RenderChatRequest(messages=[content_pb2.ChatMessage(role="user")])


def _forward_backward(w: World) -> trainer.ForwardBackwardRequest:
    start = trainer.ForwardBackwardStart(
        chunk_count=1, losses=[loss_pb2.LossComponent(name="main")], **_trainer(w)
    )
    return trainer.ForwardBackwardRequest(start=start)


def _group(w: World) -> env.OpenGroupRequest:
    return env.OpenGroupRequest(request_id=_id(), environment="environments/game", size=1)


def _upload(w: World) -> package_pb2.UploadPackageRequest:
    # Refused for its archive, so that nothing is built.
    spec = package_pb2.PackageSpec(target="game:Game")
    return package_pb2.UploadPackageRequest(
        request_id=_id(), environment_id="mine", spec=spec, archive=b"no zip"
    )


def _probe(w: World) -> package_pb2.ProbeEnvironmentRequest:
    return package_pb2.ProbeEnvironmentRequest(environment="environments/none")


_TRAINER: Mapping[str, Row] = {
    "CreatePolicy": Row(JOB, _create_policy, "JOB_NOT_FOUND", changes=True),
    "UnloadPolicy": Row(
        JOB,
        lambda w: trainer.UnloadPolicyRequest(policy=w.policy, request_id=_id(), attempt=w.attempt),
        "POLICY_NOT_FOUND",
        changes=True,
    ),
    "GetPolicy": Row(JOB, lambda w: trainer.GetPolicyRequest(policy=w.policy), "POLICY_NOT_FOUND"),
    "Forward": Row(
        JOB,
        lambda w: trainer.ForwardRequest(start=trainer.ForwardStart(chunk_count=1, **_trainer(w))),
        "POLICY_NOT_FOUND",
        changes=True,
    ),
    "ForwardBackward": Row(JOB, _forward_backward, "POLICY_NOT_FOUND", changes=True),
    "OptimStep": Row(
        JOB,
        lambda w: trainer.OptimStepRequest(forward_backward_seqs=[1], adamw=trainer.AdamW(), **_trainer(w)),
        "POLICY_NOT_FOUND",
        changes=True,
    ),
    "SaveCheckpoint": Row(
        JOB, lambda w: trainer.SaveCheckpointRequest(**_trainer(w)), "POLICY_NOT_FOUND", changes=True
    ),
    "RestoreCheckpoint": Row(
        JOB,
        lambda w: trainer.RestoreCheckpointRequest(checkpoint=w.checkpoint, **_trainer(w)),
        "POLICY_NOT_FOUND",
        changes=True,
    ),
    "PublishWeights": Row(
        JOB, lambda w: trainer.PublishWeightsRequest(**_trainer(w)), "POLICY_NOT_FOUND", changes=True
    ),
    "WatchOperations": Row(
        JOB, lambda w: trainer.WatchOperationsRequest(policy=w.policy), "POLICY_NOT_FOUND"
    ),
    "GetOperation": Row(
        JOB, lambda w: trainer.GetOperationRequest(policy=w.policy, seq=1), "POLICY_NOT_FOUND"
    ),
    "GetTokenizer": Row(VIEWER, lambda w: trainer.GetTokenizerRequest()),
    "GetCapabilities": Row(VIEWER, lambda w: trainer.GetCapabilitiesRequest()),
}

_INFERENCE: Mapping[str, Row] = {
    "Sample": Row(JOB, _sample, "VERSION_NOT_FOUND", sibling="OK"),
    "StreamSample": Row(
        JOB, lambda w: inference.StreamSampleRequest(sample=_sample(w)), "VERSION_NOT_FOUND", sibling="OK"
    ),
    "ScoreTokens": Row(
        JOB,
        lambda w: inference.ScoreTokensRequest(
            model=sampling_pb2.ModelRef(policy_version=_ref(w)), sequences=[_prompt()]
        ),
        "VERSION_NOT_FOUND",
        sibling="OK",
    ),
    "CancelSample": Row(
        JOB,
        lambda w: inference.CancelSampleRequest(request_id=f"of {w.job}"),
        "REQUEST_NOT_FOUND",
        changes=True,
    ),
    "AckCompletions": Row(JOB, lambda w: inference.AckCompletionsRequest(request_ids=[f"of {w.job}"])),
    "LoadPolicyVersion": Row(
        JOB,
        lambda w: inference.LoadPolicyVersionRequest(policy_version=_ref(w)),
        "VERSION_NOT_FOUND",
        sibling="OK",
    ),
    "UnloadPolicyVersion": Row(
        JOB,
        lambda w: inference.UnloadPolicyVersionRequest(policy_version=_ref(w)),
        "VERSION_NOT_FOUND",
        sibling="OK",
        changes=True,
    ),
    "ListModels": Row(JOB, lambda w: inference.ListModelsRequest(), sibling="OK"),
    "GetTokenizer": Row(VIEWER, lambda w: inference.GetTokenizerRequest()),
    "RenderChat": Row(VIEWER, _chat),
    "Tokenize": Row(VIEWER, lambda w: inference.TokenizeRequest(text="a")),
    "Detokenize": Row(VIEWER, lambda w: inference.DetokenizeRequest(token_ids=pack_ids([1]))),
    "GetCapabilities": Row(VIEWER, lambda w: inference.GetCapabilitiesRequest()),
}

_ENV_HOST: Mapping[str, Row] = {
    "GetCapabilities": Row(VIEWER, lambda w: capabilities_pb2.GetCapabilitiesRequest()),
    "ListEnvironments": Row(VIEWER, lambda w: env.ListEnvironmentsRequest()),
    "GetEnvironment": Row(VIEWER, lambda w: env.GetEnvironmentRequest(name="environments/game")),
    "ListTasks": Row(
        VIEWER,
        lambda w: env.ListTasksRequest(environment="environments/game", split="none"),
        "INVALID_FIELD",
        changes=True,
    ),
    "UploadPackage": Row(MEMBER, _upload, "INVALID_FIELD", changes=True),
    "ListEnvironmentVersions": Row(VIEWER, lambda w: package_pb2.ListEnvironmentVersionsRequest()),
    "GetEnvironmentVersion": Row(
        VIEWER,
        lambda w: package_pb2.GetEnvironmentVersionRequest(name=w.package),
        "ENVIRONMENT_NOT_FOUND",
    ),
    # One of B's own could have this name: that there is none is passed over.
    "DeleteEnvironmentVersion": Row(
        MEMBER, lambda w: package_pb2.DeleteEnvironmentVersionRequest(name=w.package), changes=True
    ),
    "GetEnvironmentLog": Row(
        VIEWER, lambda w: package_pb2.GetEnvironmentLogRequest(name=w.package), "ENVIRONMENT_NOT_FOUND"
    ),
    "ProbeEnvironment": Row(MEMBER, _probe, "UNKNOWN_ENVIRONMENT", changes=True),
    "OpenGroup": Row(JOB, _group),
    "Begin": Row(JOB, lambda w: env.BeginRequest(episode=w.episode), "EPISODE_NOT_FOUND"),
    "Step": Row(JOB, _step, "EPISODE_NOT_FOUND", changes=True),
    "Finalize": Row(JOB, lambda w: env.FinalizeRequest(episode=w.episode), "EPISODE_NOT_FOUND", changes=True),
    # What B is told of an episode of A is in the reply: see test_drive_hides_the_episodes_of_others.
    "Drive": Row(JOB, _drive),
    "Snapshot": Row(
        JOB,
        lambda w: snapshot_pb2.SnapshotRequest(request_id=_id(), episode=w.episode),
        "EPISODE_NOT_FOUND",
        changes=True,
    ),
    "Fork": Row(
        JOB,
        lambda w: snapshot_pb2.ForkRequest(request_id=_id(), snapshot=w.snapshot, size=1),
        "SNAPSHOT_NOT_FOUND",
    ),
    "Restore": Row(
        JOB,
        lambda w: snapshot_pb2.RestoreRequest(request_id=_id(), episode=w.episode, snapshot=w.snapshot),
        "EPISODE_NOT_FOUND",
        changes=True,
    ),
    "CloseEpisodes": Row(JOB, lambda w: env.CloseEpisodesRequest(episodes=[w.episode]), changes=True),
    "RenewLease": Row(JOB, lambda w: env.RenewLeaseRequest(episodes=[w.episode])),
}

ROWS: Mapping[str, Row] = named(
    {"TrainerService": _TRAINER, "InferenceService": _INFERENCE, "EnvHostService": _ENV_HOST}
)
