"""Environment data to and from the plain values that cross the pipe between env_host and a worker.

A plain value is JSON plus a list of byte strings (images, arrays) that it names by index. No protobuf: what a
worker's packages pin must not matter to the host.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from opentinker.environments.agents import Actions, JointResult, JointStep, Observations
from opentinker.environments.content import Array, Content, Image, Json, Message, Part, Text, ToolCall
from opentinker.environments.measures import plain_metrics
from opentinker.environments.rewards import Reward
from opentinker.environments.types import AGENT, Action, Observation

Plain = dict[str, Any]
Blobs = list[bytes]

_dump_sorted = json.JSONEncoder(sort_keys=True).encode


def plain_observations(observations: Observations, blobs: Blobs) -> Plain:
    """Whose move it is and what they see, as a plain value; appends to `blobs`."""
    return {name: plain_observation(each, blobs) for name, each in observations.items()}


def plain_observation(observation: Observation, blobs: Blobs) -> Plain:
    """An observation as a plain value; appends to `blobs`."""
    plain: Plain = {}
    if observation.content is not None:
        plain["content"] = _plain_content(observation.content, blobs)
    else:
        plain["messages"] = [_plain_message(message, blobs) for message in observation.messages]
    if observation.legal_actions:
        plain["legal_actions"] = list(observation.legal_actions)
    if observation.info:
        plain["info"] = observation.info
    return plain


def plain_step(step: JointStep, blobs: Blobs) -> Plain:
    """What came of a turn as a plain value; appends to `blobs`."""
    plain: Plain = {
        "observations": plain_observations(step.observations, blobs),
        "rewards": {name: plain_reward(reward) for name, reward in step.rewards.items()},
        "terminated": step.terminated,
        "truncated": step.truncated,
        "info": step.info,
    }
    if step.ended:
        plain["ended"] = dict(step.ended)
    return plain


def plain_result(result: JointResult) -> Plain:
    """What an episode came to as a plain value."""
    return {
        "rewards": {name: plain_reward(reward) for name, reward in result.rewards.items()},
        "end_reason": result.end_reason,
        "metrics": plain_metrics(result.metrics),
    }


def plain_reward(reward: Reward) -> Plain:
    """A reward as a plain value."""
    plain: Plain = {"status": reward.status, "kind": reward.kind}
    if reward.value is not None:
        plain["value"] = reward.value
    if reward.components:
        plain["components"] = dict(reward.components)
    return plain


def read_actions(plain: Mapping[str, Any]) -> Actions:
    """The actions of a turn from their plain values: by agent, or that of the only one."""
    if "agents" in plain:
        return {name: read_action(action) for name, action in plain["agents"].items()}
    return {AGENT: read_action(plain)}


def read_action(plain: Mapping[str, Any]) -> Action:
    """An action from its plain value."""
    calls = [ToolCall(call["name"], call["arguments"], call["id"]) for call in plain.get("tool_calls", ())]
    return Action(plain["text"], tuple(calls))


def digest(answer: Mapping[str, Any], blobs: Sequence[bytes]) -> str:
    """A hash of what an agent gets to see or feel; not of `info`, which may hold timings."""
    seen = {key: value for key, value in answer.items() if key != "info"}
    if "observations" in seen:
        seen["observations"] = {
            name: {key: value for key, value in each.items() if key != "info"}
            for name, each in seen["observations"].items()
        }
    state = hashlib.blake2b(_dump_sorted(seen).encode(), digest_size=16)
    for blob in blobs:
        state.update(len(blob).to_bytes(8, "little"))
        state.update(blob)
    return state.hexdigest()


def _plain_content(content: Content, blobs: Blobs) -> list[Plain]:
    return [_plain_part(part, blobs) for part in content.parts]


def _plain_part(part: Part, blobs: Blobs) -> Plain:
    match part:
        case Text():
            return {"text": part.text}
        case Json():
            return {"json": part.text}
        case Image():
            blobs.append(part.data)
            return {"image": len(blobs) - 1, "media_type": part.media_type}
        case Array():
            blobs.append(part.data)
            return {"array": len(blobs) - 1, "dtype": part.dtype, "shape": list(part.shape)}


def _plain_message(message: Message, blobs: Blobs) -> Plain:
    return {
        "role": message.role,
        "content": _plain_content(message.content, blobs),
        "tool_calls": [
            {"name": call.name, "arguments": call.arguments, "id": call.id} for call in message.tool_calls
        ],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
