"""Recorded episodes as data.v1.Trajectory, which every client of the protos can read."""

from opentinker_gateway.domain.episodes import Episode, Segment
from opentinker_gateway.domain.messages import Message
from opentinker_gateway.wire.sampling import prompt_pb
from opentinkerapi.data.v1 import content_pb2, prompt_pb2, trajectory_pb2
from opentinkerapi.runtime.tensors import pack_floats, pack_ids


def trajectory_pb(episode: Episode) -> trajectory_pb2.Trajectory:
    """What was recorded so far; reward and end are the agent's to say."""
    temperature = 1.0 if episode.temperature is None else episode.temperature
    return trajectory_pb2.Trajectory(
        episode=f"episodes/{episode.id}",
        group_id=episode.group,
        policy=episode.weights,
        segments=[_segment(segment, temperature) for segment in episode.segments()],
        turns=len(episode.nodes),
        seed=episode.seed,
        sampled_turns=[
            trajectory_pb2.TrajectoryTurn(
                prompt_tokens=len(node.ids()) - len(node.reply.tokens.ids),
                completion_tokens=len(node.reply.tokens.ids),
                text=node.reply.text,
                stop_reason=node.reply.stop_reason,
            )
            for node in episode.nodes
        ],
        messages=[_message(message) for message in episode.messages],
    )


def _segment(segment: Segment, temperature: float) -> trajectory_pb2.TrajectorySegment:
    return trajectory_pb2.TrajectorySegment(
        chunks=prompt_pb(segment.ids).chunks,
        loss_mask=bytes(segment.mask),
        logprobs=pack_floats(segment.logprobs),
        version_spans=[
            prompt_pb2.VersionSpan(start=start, end=end, version=version)
            for start, end, version in segment.spans
        ],
        sampling_temperature=temperature,
        support_sizes=pack_ids(segment.support.sizes),
        support_token_ids=pack_ids(segment.support.ids),
    )


def _message(message: Message) -> content_pb2.ChatMessage:
    content = content_pb2.Content(parts=[content_pb2.ContentPart(text=message.content)])
    return content_pb2.ChatMessage(
        role=message.role,
        content=content if message.content else None,
        tool_calls=[
            content_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments)
            for call in message.calls
        ],
        tool_call_id=message.call_id,
        name=message.name,
    )
