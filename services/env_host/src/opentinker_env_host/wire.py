"""Protobuf to and from the plain values that cross the pipe to a worker: the only module that knows both."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from opentinker_env_host.domain.episode import Answered, Recipe
from opentinker_env_host.ports import EnvironmentFacts, Reply, SandboxFacts
from opentinker_kit.errors import ServiceError
from opentinkerapi.data.v1 import content_pb2, tensor_pb2, trajectory_pb2
from opentinkerapi.env.v1 import capabilities_pb2, environment_pb2
from opentinkerapi.env.v1 import env_host_service_pb2 as service_pb2
from opentinkerapi.runtime.images import INLINE_MAX_BYTES
from opentinkerapi.runtime.reasons import Reason

AGENT = "agent"
LEASE_TTL_S = 60.0
STEP_TIMEOUT_S = 30.0
ENVIRONMENTS = "environments/"

_DTYPES: Mapping[str, "tensor_pb2.DType.ValueType"] = {
    "float32": tensor_pb2.D_TYPE_FLOAT32,
    "float64": tensor_pb2.D_TYPE_FLOAT64,
    "int32": tensor_pb2.D_TYPE_INT32,
    "int64": tensor_pb2.D_TYPE_INT64,
    "bool": tensor_pb2.D_TYPE_BOOL,
    "uint8": tensor_pb2.D_TYPE_UINT8,
}


SNAPSHOT_KINDS: Mapping[str, "environment_pb2.SnapshotKind.ValueType"] = {
    "NONE": environment_pb2.SNAPSHOT_KIND_NONE,
    "NATIVE": environment_pb2.SNAPSHOT_KIND_NATIVE,
    "COPY": environment_pb2.SNAPSHOT_KIND_COPY,
    "REPLAY": environment_pb2.SNAPSHOT_KIND_REPLAY,
}
_SANDBOX_MODES: Mapping[str, "capabilities_pb2.SandboxMode.ValueType"] = {
    "": capabilities_pb2.SANDBOX_MODE_NONE,
    "SLOT_UID": capabilities_pb2.SANDBOX_MODE_SLOT_UID,
    "USER_NAMESPACE": capabilities_pb2.SANDBOX_MODE_USER_NAMESPACE,
}


def capabilities_to_proto(sandbox: SandboxFacts) -> capabilities_pb2.GetCapabilitiesResponse:
    """What the host offers."""
    return capabilities_pb2.GetCapabilitiesResponse(
        sandbox_mode=_SANDBOX_MODES.get(sandbox.mode, capabilities_pb2.SANDBOX_MODE_UNSPECIFIED),
        sandbox_error=sandbox.error,
        sandbox_version=sandbox.version,
    )


def environment_id(name: str, field: str) -> str:
    """The id in "environments/{id}". ServiceError INVALID_FIELD for another shape."""
    if not name.startswith(ENVIRONMENTS) or "/" in name.removeprefix(ENVIRONMENTS):
        raise ServiceError(
            Reason.INVALID_FIELD, f'{name!r} is not of the form "environments/<id>"', field=field
        )
    return name.removeprefix(ENVIRONMENTS)


def environment_to_proto(name: str, facts: EnvironmentFacts) -> environment_pb2.Environment:
    """A hosted environment."""
    run_timeout = Duration()
    run_timeout.FromNanoseconds(int(facts.run_timeout_s * 1e9))
    return environment_pb2.Environment(
        name=f"{ENVIRONMENTS}{name}",
        description=facts.description,
        version=facts.version,
        max_turns=facts.max_turns,
        deterministic=facts.deterministic,
        splits=facts.splits,
        agents=facts.agents,
        tools_json=[json.dumps(schema) for schema in facts.tools],
        run_timeout=run_timeout if facts.run_timeout_s else None,
        snapshots=SNAPSHOT_KINDS.get(facts.snapshots, environment_pb2.SNAPSHOT_KIND_UNSPECIFIED),
    )


def json_object(text: str, field: str) -> dict[str, Any]:
    """The JSON object in a field, empty where the field is. ServiceError INVALID_FIELD."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ServiceError(Reason.INVALID_FIELD, f"no JSON: {error}", field=field) from None
    if not isinstance(value, dict):
        raise ServiceError(Reason.INVALID_FIELD, f"must be a JSON object, not {text[:40]!r}", field=field)
    return value


def recipe_from_proto(request: service_pb2.OpenGroupRequest) -> Recipe:
    """What the group's episodes are made of."""
    return Recipe(
        environment=environment_id(request.environment, "environment"),
        seed=request.seed,
        task=json_object(request.task_json, "task_json"),
        options=json_object(request.options_json, "options_json"),
        lease_ttl_s=_seconds(request, "lease_ttl", LEASE_TTL_S, 0.5, 86_400.0),
        step_timeout_s=_seconds(request, "step_timeout", STEP_TIMEOUT_S, 0.05, 3_600.0),
    )


def actions_from_proto(actions: Sequence[environment_pb2.AgentAction]) -> dict[str, Any]:
    """The actions of a turn by agent; an agent without a name is the only one."""
    plain: dict[str, Any] = {}
    for index, given in enumerate(actions):
        name = given.agent or AGENT
        if name in plain:
            text = f"{name!r} has two actions in one turn"
            raise ServiceError(Reason.INVALID_FIELD, text, field=f"actions[{index}].agent")
        plain[name] = _action(given.action, f"actions[{index}].action")
    return {"agents": plain}


def _action(action: environment_pb2.Action, field: str) -> dict[str, Any]:
    texts: list[str] = []
    for index, part in enumerate(action.content.parts):
        if part.WhichOneof("part") != "text":
            text = "an action's content must be text"
            raise ServiceError(Reason.INVALID_FIELD, text, field=f"{field}.content.parts[{index}]")
        texts.append(part.text)
    calls = [
        {"name": call.name, "arguments": call.arguments_json, "id": call.id} for call in action.tool_calls
    ]
    return {"text": "".join(texts), "tool_calls": calls} if calls else {"text": "".join(texts)}


def action_key(actions: Sequence[environment_pb2.AgentAction]) -> bytes:
    """Bytes that are equal where the actions are."""
    return b"\0".join(sorted(action.SerializeToString(deterministic=True) for action in actions))


def begin_to_proto(reply: Reply) -> service_pb2.BeginResponse:
    """The first observation."""
    return service_pb2.BeginResponse(pending=_pending(reply))


def step_to_proto(answered: Answered) -> service_pb2.StepResponse:
    """What came of a turn."""
    reply = answered.reply
    answer = reply.answer
    env_time = Duration()
    env_time.FromNanoseconds(int(reply.env_s * 1e9))
    return service_pb2.StepResponse(
        pending=_pending(reply),
        rewards=_rewards(answer),
        terminated=answer["terminated"],
        truncated=answer["truncated"],
        info_json=json.dumps(answer["info"]) if answer["info"] else "",
        replayed=answered.replayed,
        env_time=env_time,
        ended=[
            environment_pb2.AgentEnd(agent=name, end_reason=_end_reason(end))
            for name, end in answer.get("ended", {}).items()
        ],
    )


def result_to_proto(reply: Reply) -> service_pb2.FinalizeResponse:
    """What an episode came to."""
    answer = reply.answer
    end = trajectory_pb2.END_REASON_UNSPECIFIED
    if answer["end_reason"]:
        end = _end_reason(answer["end_reason"])
    return service_pb2.FinalizeResponse(
        rewards=_rewards(answer),
        end_reason=end,
        metrics_json=json.dumps(answer["metrics"]) if answer["metrics"] else "",
    )


def _pending(reply: Reply) -> list[environment_pb2.AgentObservation]:
    """Whose move it is: nobody's once the episode ended, but last observations are still told."""
    return [
        environment_pb2.AgentObservation(agent=name, observation=_observation(plain, reply.blobs))
        for name, plain in reply.answer["observations"].items()
    ]


def _observation(plain: Mapping[str, Any], blobs: Sequence[bytes]) -> environment_pb2.Observation:
    observation = environment_pb2.Observation(
        info_json=json.dumps(plain["info"]) if plain.get("info") else "",
        legal_actions=plain.get("legal_actions", ()),
    )
    if "messages" in plain:
        observation.chat.messages.extend(_message(message, blobs) for message in plain["messages"])
    else:
        observation.content.CopyFrom(_content(plain["content"], blobs))
    return observation


def _rewards(answer: Mapping[str, Any]) -> list[environment_pb2.AgentReward]:
    return [
        environment_pb2.AgentReward(agent=name, reward=_reward(plain))
        for name, plain in answer["rewards"].items()
    ]


def _end_reason(name: str) -> "trajectory_pb2.EndReason.ValueType":
    return trajectory_pb2.EndReason.Value(f"END_REASON_{name}")


def _message(plain: Mapping[str, Any], blobs: Sequence[bytes]) -> content_pb2.ChatMessage:
    return content_pb2.ChatMessage(
        role=plain["role"],
        content=_content(plain["content"], blobs),
        tool_calls=[
            content_pb2.ToolCall(id=call["id"], name=call["name"], arguments_json=call["arguments"])
            for call in plain["tool_calls"]
        ],
        tool_call_id=plain["tool_call_id"],
        name=plain["name"],
    )


def _content(parts: Sequence[Mapping[str, Any]], blobs: Sequence[bytes]) -> content_pb2.Content:
    return content_pb2.Content(parts=[_part(part, blobs) for part in parts])


def _part(part: Mapping[str, Any], blobs: Sequence[bytes]) -> content_pb2.ContentPart:
    if "text" in part:
        return content_pb2.ContentPart(text=part["text"])
    if "json" in part:
        return content_pb2.ContentPart(json=part["json"])
    if "image" in part:
        data = blobs[part["image"]]
        if len(data) > INLINE_MAX_BYTES:
            text = f"an image of {len(data)} bytes is over the {INLINE_MAX_BYTES} that a hosted one may have"
            raise ServiceError(Reason.ENV_CRASHED, text)
        image = content_pb2.Image(inline=data, media_type=part["media_type"])
        return content_pb2.ContentPart(image=image)
    dtype = _DTYPES.get(part["dtype"])
    if dtype is None:
        raise ServiceError(
            Reason.ENV_CRASHED,
            f"an array of {part['dtype']} in an observation cannot travel; use one of {', '.join(_DTYPES)}",
        )
    return content_pb2.ContentPart(
        tensor=tensor_pb2.Tensor(dtype=dtype, shape=part["shape"], inline=blobs[part["array"]])
    )


def _reward(plain: Mapping[str, Any]) -> trajectory_pb2.Reward:
    return trajectory_pb2.Reward(
        value=plain.get("value"),
        status=trajectory_pb2.RewardStatus.Value(f"REWARD_STATUS_{plain['status']}"),
        kind=trajectory_pb2.RewardKind.Value(f"REWARD_KIND_{plain['kind']}"),
        components=plain.get("components", {}),
    )


def _seconds(
    request: service_pb2.OpenGroupRequest, field: str, default: float, least: float, most: float
) -> float:
    if not request.HasField(field):  # type: ignore[arg-type]
        return default
    duration: Duration = getattr(request, field)
    seconds = duration.ToTimedelta().total_seconds()
    if not least <= seconds <= most:
        raise ServiceError(
            Reason.INVALID_FIELD, f"must be from {least:g} s to {most:g} s, not {seconds:g} s", field=field
        )
    return seconds
