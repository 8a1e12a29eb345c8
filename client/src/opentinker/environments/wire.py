"""Environment data to and from protobuf: the only module of this package that knows both."""

import json
from collections.abc import Iterable
from typing import Any, cast

import numpy

from opentinker.environments.agents import Actions, JointResult, JointStep
from opentinker.environments.base import EnvironmentInfo
from opentinker.environments.content import Array, Content, Image, Json, Message, Part, Text, ToolCall
from opentinker.environments.errors import InvalidEpisodeData
from opentinker.environments.measures import read_metrics
from opentinker.environments.rewards import Reward, RewardKind, RewardStatus
from opentinker.environments.types import AGENT, Action, EndReason, Observation
from opentinkerapi.data.v1 import content_pb2, trajectory_pb2
from opentinkerapi.env.v1 import env_host_service_pb2 as service_pb2
from opentinkerapi.env.v1 import environment_pb2
from opentinkerapi.runtime.tensors import pack, unpack


def content_to_proto(content: Content) -> content_pb2.Content:
    """Content as it travels."""
    return content_pb2.Content(parts=[_part_to_proto(part) for part in content.parts])


def content_from_proto(content: content_pb2.Content) -> Content:
    """Content as it came. InvalidEpisodeData for parts in the object store, which are not read here."""
    return Content(tuple(_part_from_proto(part) for part in content.parts))


def message_to_proto(message: Message) -> content_pb2.ChatMessage:
    """A chat message as it travels."""
    return content_pb2.ChatMessage(
        role=message.role,
        content=content_to_proto(message.content),
        tool_calls=[_call_to_proto(call) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def message_from_proto(message: content_pb2.ChatMessage) -> Message:
    """A chat message as it came."""
    return Message(
        message.role,
        content_from_proto(message.content),
        [ToolCall(call.name, call.arguments_json, call.id) for call in message.tool_calls],
        message.tool_call_id,
        message.name,
    )


def actions_to_proto(actions: Actions) -> list[environment_pb2.AgentAction]:
    """The actions of a turn as they travel."""
    return [
        environment_pb2.AgentAction(agent=name, action=_action_to_proto(action))
        for name, action in actions.items()
    ]


def observations_from_proto(pending: Iterable[environment_pb2.AgentObservation]) -> dict[str, Observation]:
    """Whose move it is and what they see."""
    return {each.agent: _observation_from_proto(each.observation) for each in pending}


def step_from_proto(answer: service_pb2.StepResponse) -> JointStep:
    """What came of a turn."""
    return JointStep(
        observations_from_proto(answer.pending),
        _rewards_from_proto(answer.rewards),
        answer.terminated,
        answer.truncated,
        {each.agent: _end_reason(each.end_reason) for each in answer.ended},
        json.loads(answer.info_json) if answer.info_json else {},
    )


def result_from_proto(answer: service_pb2.FinalizeResponse) -> JointResult:
    """What an episode came to."""
    end = _end_reason(answer.end_reason) if answer.end_reason else None
    metrics = read_metrics(json.loads(answer.metrics_json)) if answer.metrics_json else {}
    return JointResult(_rewards_from_proto(answer.rewards), end, metrics)


def info_from_proto(environment: environment_pb2.Environment) -> EnvironmentInfo:
    """What a hosted environment says about itself."""
    return EnvironmentInfo(
        name=environment.name.removeprefix("environments/"),
        description=environment.description,
        version=environment.version,
        max_turns=environment.max_turns,
        deterministic=environment.deterministic,
        splits=tuple(environment.splits),
        agents=tuple(environment.agents) or (AGENT,),
        tools=tuple(json.loads(schema) for schema in environment.tools_json),
        run_timeout_s=environment.run_timeout.ToTimedelta().total_seconds(),
        snapshots=environment_pb2.SnapshotKind.Name(environment.snapshots).removeprefix("SNAPSHOT_KIND_"),
    )


def _action_to_proto(action: Action) -> environment_pb2.Action:
    content = content_pb2.Content(parts=[content_pb2.ContentPart(text=action.text)])
    return environment_pb2.Action(
        content=content, tool_calls=[_call_to_proto(call) for call in action.tool_calls]
    )


def _observation_from_proto(observation: environment_pb2.Observation) -> Observation:
    info = json.loads(observation.info_json) if observation.info_json else {}
    if observation.WhichOneof("observation") == "chat":
        messages = [message_from_proto(message) for message in observation.chat.messages]
        return Observation(messages=messages, info=info, legal_actions=observation.legal_actions)
    content = content_from_proto(observation.content)
    return Observation(content, info=info, legal_actions=observation.legal_actions)


def _rewards_from_proto(rewards: Iterable[environment_pb2.AgentReward]) -> dict[str, Reward]:
    return {each.agent: _reward_from_proto(each.reward) for each in rewards}


def _reward_from_proto(reward: trajectory_pb2.Reward) -> Reward:
    status = trajectory_pb2.RewardStatus.Name(reward.status or trajectory_pb2.REWARD_STATUS_UNSCORED)
    kind = trajectory_pb2.RewardKind.Name(reward.kind or trajectory_pb2.REWARD_KIND_DELTA)
    return Reward(
        reward.value if reward.HasField("value") else None,
        RewardStatus(status.removeprefix("REWARD_STATUS_")),
        RewardKind(kind.removeprefix("REWARD_KIND_")),
        dict(reward.components),
    )


def _end_reason(value: "trajectory_pb2.EndReason.ValueType") -> EndReason:
    return EndReason(trajectory_pb2.EndReason.Name(value).removeprefix("END_REASON_"))


def _call_to_proto(call: ToolCall) -> content_pb2.ToolCall:
    return content_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments)


def _part_to_proto(part: Part) -> content_pb2.ContentPart:
    match part:
        case Text():
            return content_pb2.ContentPart(text=part.text)
        case Json():
            return content_pb2.ContentPart(json=part.text)
        case Image():
            image = content_pb2.Image(inline=part.data, media_type=part.media_type)
            return content_pb2.ContentPart(image=image)
        case Array():
            return content_pb2.ContentPart(tensor=pack(part.numpy()))


def _part_from_proto(part: content_pb2.ContentPart) -> Part:
    kind = part.WhichOneof("part")
    if kind == "text":
        return Text(part.text)
    if kind == "json":
        return Json(part.json)
    if kind == "image" and part.image.WhichOneof("source") == "inline":
        return Image(part.image.inline, part.image.media_type)
    if kind == "tensor" and part.tensor.WhichOneof("payload") == "inline":
        return Array.of(cast("numpy.ndarray[Any, Any]", unpack(part.tensor)))
    raise InvalidEpisodeData(f"a content part of kind {kind} cannot be read here")
