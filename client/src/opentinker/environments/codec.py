"""Environment data to and from the plain values that cross the pipe between env_host and a worker.

A plain value is JSON plus a list of byte strings (images, arrays) that it names by index. No protobuf: what a
worker's packages pin must not matter to the host.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from opentinker.environments.content import Array, Content, Image, Json, Message, Part, Text, ToolCall
from opentinker.environments.rewards import Reward
from opentinker.environments.types import Action, EpisodeResult, Observation, StepResult

Plain = dict[str, Any]
Blobs = list[bytes]

_dump_sorted = json.JSONEncoder(sort_keys=True).encode


def plain_observation(observation: Observation | None, blobs: Blobs) -> Plain | None:
    """An observation as a plain value; appends to `blobs`."""
    if observation is None:
        return None
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


def plain_step(result: StepResult, blobs: Blobs) -> Plain:
    """What came of a turn as a plain value; appends to `blobs`."""
    return {
        "observation": plain_observation(result.observation, blobs),
        "reward": plain_reward(result.reward),
        "terminated": result.terminated,
        "truncated": result.truncated,
        "info": result.info,
    }


def plain_result(result: EpisodeResult) -> Plain:
    """What an episode came to as a plain value."""
    return {
        "reward": plain_reward(result.reward),
        "end_reason": result.end_reason,
        "metrics": dict(result.metrics),
    }


def plain_reward(reward: Reward) -> Plain:
    """A reward as a plain value."""
    plain: Plain = {"status": reward.status, "kind": reward.kind}
    if reward.value is not None:
        plain["value"] = reward.value
    if reward.components:
        plain["components"] = dict(reward.components)
    return plain


def read_action(plain: Mapping[str, Any]) -> Action:
    """An action from its plain value."""
    calls = [ToolCall(call["name"], call["arguments"], call["id"]) for call in plain.get("tool_calls", ())]
    return Action(plain["text"], tuple(calls))


def digest(answer: Mapping[str, Any], blobs: Sequence[bytes]) -> str:
    """A hash of what an agent gets to see or feel; not of `info`, which may hold timings."""
    seen = {key: value for key, value in answer.items() if key != "info"}
    if seen.get("observation"):
        seen["observation"] = {key: value for key, value in seen["observation"].items() if key != "info"}
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
