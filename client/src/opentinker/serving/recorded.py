"""Agents that own their loop: they know OpenAI's API and nothing of us, and what they play is trained on.

    episode = ot.record_episode(policy, group="task-7", member=0).result()
    play(openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key))    # model="policy"
    trajectory = episode.finish(reward=1.0).result()

The gateway records each reply as it was sampled: token ids, logprobs, version. Where a call goes on from an
earlier one, its prompt is the ids so far and what the chat template adds, so that what is trained is what was
sampled, whatever the agent did with the text in between.
"""

import asyncio
import http.client
import ipaddress
import json
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from opentinker import errors
from opentinker.connection.portal import Pending
from opentinker.environments.content import Content, Message, ToolCall
from opentinker.environments.rewards import Reward
from opentinker.environments.types import EndReason
from opentinker.rollout.trajectory import Segment, Trajectory, Turn
from opentinker.sampling.completion import StopReason
from opentinker.sampling.params import SamplingParams
from opentinker.sampling.support import Support
from opentinkerapi.data.v1 import content_pb2, trajectory_pb2
from opentinkerapi.runtime.reasons import CATALOGUE
from opentinkerapi.runtime.status import StatusData
from opentinkerapi.runtime.tensors import unpack_floats, unpack_ids

if TYPE_CHECKING:
    from opentinker.connection.cluster import Cluster
    from opentinker.training.policy import Policy

TIMEOUT_S = 330.0
"""The gateway waits five minutes for a model to be served."""
TRIES = 5
PAUSE_S = 0.5
_DECIDED = ("max_tokens", "temperature", "top_p", "top_k", "min_p")


def record_episode(
    policy: "Policy",
    *,
    group: str = "",
    member: int = 0,
    version: int | None = None,
    sampling: SamplingParams | None = None,
    seed: int = 0,
) -> Pending["RecordedEpisode"]:
    """An episode at the cluster's gateway for an agent that owns its loop.

    All of it is sampled from `version` (default: the newest published). `group` and `member` say what the
    trajectory is compared with. `sampling` overrules what the agent asks for; without it the agent decides,
    and its first call settles the temperature. Seeds of its calls derive from `seed`.
    """
    number = policy.version if version is None else version
    wanted = decided(sampling)
    return Pending.of(
        policy.portal, create_episode(policy, group, member, version=number, decided=wanted, seed=seed)
    )


async def create_episode(
    policy: "Policy",
    group: str,
    member: int,
    *,
    version: int,
    decided: Mapping[str, Any],
    seed: int,
    limits: Mapping[str, int] | None = None,
) -> "RecordedEpisode":
    """A new episode, on the client's loop. `limits`: the gateway's `max_calls` and `max_tokens`."""
    gateway = (await policy.cluster.info()).gateway_address
    if not gateway:
        raise errors.FailedPrecondition(
            "this cluster has no gateway, which records the episodes of agents that own their loop",
            reason=errors.Reason.INVALID_STATE,
        )
    body = {
        "request_id": f"episode-{uuid.uuid4().hex}",
        "model": f"{policy.name}/versions/{version}",
        "group": group,
        "seed": seed,
        "sampling": decided,
        **(limits or {}),
    }
    at = _Gateway(gateway, policy.cluster.control.key or "")
    made = json.loads(await at.call("POST", "/episodes", body))
    return RecordedEpisode(policy.cluster, at, made, group, member)


class RecordedEpisode:
    """One episode that is being recorded. A `with` block ends it at the gateway, finished or not."""

    def __init__(
        self, cluster: "Cluster", gateway: "_Gateway", made: Mapping[str, Any], group: str, member: int
    ) -> None:
        self.id = str(made["id"])
        self.base_url = f"{gateway.url}{made['base_path']}"
        """`base_url` for OpenAI clients; the model is called "policy"."""
        self.api_key = str(made["api_key"])
        """Opens this episode and nothing else, so it may be given to an agent that nobody trusts."""
        self._cluster = cluster
        self._gateway = gateway
        self._group = group
        self._member = member
        self._over = False

    def __repr__(self) -> str:
        return f"<RecordedEpisode {self.id}>"

    def finish(
        self,
        reward: Reward | float | None,
        *,
        end_reason: EndReason = EndReason.TERMINATED,
        metrics: Mapping[str, float] | None = None,
    ) -> Pending[Trajectory]:
        """End it, and give what was played. `reward` None: it has none and is not trained on.

        Raises EpisodeNotFound where the gateway has forgotten it: it is to be played again.
        """

        async def fetch() -> Trajectory:
            played = await self.played()
            await self.end()
            return replace(
                played, reward=Reward.of(reward), end_reason=end_reason, metrics=dict(metrics or {})
            )

        return Pending.of(self._cluster.portal, fetch())

    def close(self) -> Pending[None]:
        """Forget it. Ending it twice is no error."""
        return Pending.of(self._cluster.portal, self.end())

    async def played(self) -> Trajectory:
        """What was played so far, without a reward; on the client's loop. Raises EpisodeNotFound."""
        data = await self._gateway.call("GET", f"/episodes/{self.id}/trajectory")
        return _trajectory(trajectory_pb2.Trajectory.FromString(data), self._group, self._member)

    async def facts(self) -> Mapping[str, Any]:
        """What the gateway says of it; on the client's loop. Raises EpisodeNotFound."""
        found: Mapping[str, Any] = json.loads(await self._gateway.call("GET", f"/episodes/{self.id}"))
        return found

    async def end(self) -> None:
        """Forget it; on the client's loop."""
        if self._over:
            return
        self._over = True
        try:
            await self._gateway.call("DELETE", f"/episodes/{self.id}")
        except errors.NotFound:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close().result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _Gateway:
    """The gateway's own routes, by the standard library: a few small calls an episode."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self._key = key
        host = urllib.parse.urlsplit(url).hostname or ""
        # A proxy of the environment knows no way back to this machine.
        proxies = urllib.request.ProxyHandler({} if _is_loopback(host) else None)
        self._opener = urllib.request.build_opener(proxies)

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The answer's body. What is asked twice is done once, so a call that did not get through is made
        again.
        """
        for tries in range(1, TRIES + 1):
            try:
                return await asyncio.to_thread(self._once, method, path, body)
            except (errors.Unavailable, errors.Overloaded) as error:
                if tries == TRIES:
                    raise
                await asyncio.sleep(error.retry_after_s or PAUSE_S * tries)
        raise AssertionError("unreachable")

    def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        headers = {"authorization": f"Bearer {self._key}", "accept": "application/x-protobuf"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                got: bytes = answer.read()
                return got
        except urllib.error.HTTPError as error:
            raise _error(error.code, error.read(), error.headers.get("retry-after")) from None
        except (OSError, http.client.HTTPException) as error:
            raise errors.Unavailable(
                f"the gateway at {self.url} cannot be reached: {error}", reason=errors.Reason.CONNECTION_LOST
            ) from None


def _error(status: int, body: bytes, retry_after: str | None) -> errors.OpenTinkerError:
    """What the gateway answered, as the exception of its reason."""
    try:
        told = json.loads(body)["error"]
        reason, message, field = errors.Reason(told["reason"]), str(told["message"]), told["param"]
    except (ValueError, KeyError, TypeError):
        return errors.InternalError(f"the gateway answered {status}", reason=errors.Reason.INTERNAL)
    return errors.from_status_data(
        StatusData(
            code=CATALOGUE[reason].code,
            message=message,
            reason=reason,
            violations=[(field, message)] if field else [],
            retry_after_s=float(retry_after) if retry_after else None,
        )
    )


def decided(sampling: SamplingParams | None) -> dict[str, Any]:
    """What overrules the agent. UnsupportedOption for what the trainer could not know."""
    if sampling is None:
        return {}
    default = SamplingParams()
    other = [
        name
        for name in SamplingParams.__slots__
        if name not in (*_DECIDED, "stop") and getattr(sampling, name) != getattr(default, name)
    ]
    if other:
        raise errors.unsupported(
            f"sampling.{other[0]}", f"only {', '.join(_DECIDED)} and stop are settled here"
        )
    values = {name: value for name in _DECIDED if (value := getattr(sampling, name)) is not None}
    return {**values, "stop": list(sampling.stop)} if sampling.stop else values


def _trajectory(wire: trajectory_pb2.Trajectory, group: str, member: int) -> Trajectory:
    return Trajectory(
        group=group,
        member=member,
        episode=wire.episode,
        segments=tuple(_segment(segment) for segment in wire.segments),
        turns=tuple(
            Turn(turn.prompt_tokens, turn.completion_tokens, turn.text, StopReason(turn.stop_reason), None)
            for turn in wire.sampled_turns
        ),
        reward=Reward.unscored(),
        end_reason=EndReason.TERMINATED,
        temperature=wire.segments[0].sampling_temperature if wire.segments else 1.0,
        messages=tuple(_message(message) for message in wire.messages),
    )


def _segment(wire: trajectory_pb2.TrajectorySegment) -> Segment:
    ids = tuple(token_id for chunk in wire.chunks for token_id in unpack_ids(chunk.tokens.token_ids))
    return Segment(
        token_ids=ids,
        loss_mask=tuple(wire.loss_mask),
        logprobs=unpack_floats(wire.logprobs).astype(np.float32),
        spans=tuple((span.start, span.end, span.version) for span in wire.version_spans),
        support=Support.of_wire(wire.support_sizes, wire.support_token_ids),
    )


def _message(wire: content_pb2.ChatMessage) -> Message:
    calls = [ToolCall(call.name, call.arguments_json, call.id) for call in wire.tool_calls]
    text = "".join(part.text for part in wire.content.parts)
    return Message(wire.role, Content.of(text), calls, wire.tool_call_id, wire.name)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
