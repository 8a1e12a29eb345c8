"""Recorded episodes: what an agent that owns its loop was answered, as tokens that can be trained on.

Every reply is a node of a tree: the prompt's ids that were not there before, then the ids that were sampled.
A later call whose messages go on from a reply continues that node, so that its prompt is exactly the ids so
far and the tokens that the chat template adds. A call that goes on from nothing known (another conversation,
a history that the agent or the template rewrote) begins a new branch with a fresh prompt. Each branch is a
segment of the trajectory, and each sampled token is trained in exactly one of them.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from opentinker_gateway.domain.messages import Message, rolling_digests
from opentinker_gateway.domain.prompts import ChatPrompts, Setting
from opentinker_gateway.domain.sampling import Finished, SamplingOptions, StopReason, Support
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

_NOT_RECORDED: Mapping[str, object] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "bad_words": (),
    "logit_bias": {},
    "json_schema": "",
}
"""Options under which the sampler draws from a distribution that the trainer cannot know, and the values that
mean that they are off.
"""
LISTED_TOP_K = 200
"""Where only top-p or min-p is asked for: what is cut to so that the ids that were left can be listed."""


@dataclass(slots=True)
class Node:
    """One reply: `prompt` are the ids before it that its parent has not."""

    parent: "Node | None"
    prompt: list[int]
    reply: Finished
    ordinal: int
    text: str | None = None
    """Of prompt and reply, where plain text was completed."""

    def path(self) -> list["Node"]:
        """From the root to here."""
        nodes: list[Node] = []
        at: Node | None = self
        while at is not None:
            nodes.append(at)
            at = at.parent
        return nodes[::-1]

    def ids(self) -> list[int]:
        """All ids up to the end of the reply."""
        return [token_id for node in self.path() for token_id in (*node.prompt, *node.reply.tokens.ids)]

    def whole_text(self) -> str | None:
        """Text up to the end of the reply, where all of it is plain text."""
        texts = [node.text for node in self.path()]
        return None if None in texts else "".join(text for text in texts if text is not None)


@dataclass(frozen=True, slots=True)
class Segment:
    """A branch as one row of n tokens, see TrajectorySegment."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[tuple[int, int, int], ...]
    support: Support = field(default_factory=Support)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What ends an episode, as its creator wants it. None: no such limit."""

    calls: int | None = None
    """Replies."""
    tokens: int | None = None
    """Of a prompt and its reply."""


NO_LIMITS = EpisodeLimits()


@dataclass(slots=True)
class Turn:
    """One call of an episode while it is answered."""

    ordinal: int
    attempt: int
    """Grows with each time that the same call is made again."""
    prompt_ids: list[int]
    options: SamplingOptions
    parent: Node | None
    fresh: list[int]
    """The prompt's ids that `parent` has not."""
    messages: tuple[Message, ...] = ()
    setting: Setting = field(default_factory=Setting)
    fresh_text: str | None = None
    """The same as text, where plain text is completed."""
    retry: str = ""
    """Equal for a call and its retries."""
    answered: Finished | None = None
    """The reply, where this call was answered before."""


@dataclass(slots=True)
class Episode:
    """One recorded episode."""

    id: str
    model: str
    """The name that it was created with."""
    weights: str
    """What the name stood for then; all of the episode is sampled from it."""
    group: str
    owner: str
    """Digest of its creator's key."""
    seed: int
    overrides: Mapping[str, object]
    """Sampling options that replace what the agent asks for."""
    max_tokens: int
    """Of all recorded tokens."""
    max_calls: int
    limits: EpisodeLimits = NO_LIMITS
    limit: str = ""
    """Which limit refused a call: "calls" or "tokens"."""
    temperature: float | None = None
    """Of every reply; the first call settles it."""
    nodes: list[Node] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    """The conversation of the newest reply, for people."""
    tokens: int = 0
    """Recorded so far."""
    failures: int = 0
    """Calls that were not answered; nothing of them is recorded."""
    _lost: dict[str, str] = field(default_factory=dict)
    """Why, of calls that we failed to answer and that were not made again."""
    _known: dict[bytes, Node] = field(default_factory=dict)
    _calls: int = 0
    _attempts: dict[int, int] = field(default_factory=dict)
    _retries: dict[str, int] = field(default_factory=dict)
    """Ordinals of calls, by what a retry of them would carry."""

    # --- a call ---------------------------------------------------------------------------------------------

    def chat_turn(
        self,
        messages: Sequence[Message],
        setting: Setting,
        options: SamplingOptions,
        prompts: ChatPrompts,
        retry: str,
        *,
        is_retry: bool,
    ) -> Turn:
        """Begin a chat call. `retry` is equal for a call and its retries; `is_retry` says that it is one."""
        digests = rolling_digests(messages, setting.facts())
        parent: Node | None = None
        fresh: list[int] | None = None
        for index in range(len(messages) - 2, -1, -1):
            node = self._known.get(digests[index])
            if node is None:
                continue
            before = self._as_sampled(messages[:index], digests, node)
            added = messages[index + 1 :]
            fresh = prompts.follow(before, node.reply.text, node.reply.tokens.ids, added, setting)
            if fresh is not None:
                parent = node
                break
        if fresh is None:
            fresh = prompts.first(messages, setting)
        turn = self._turn(options, parent, fresh, retry, is_retry=is_retry)
        turn.messages, turn.setting = tuple(messages), setting
        return turn

    def text_turn(
        self,
        prompt: str | Sequence[int],
        options: SamplingOptions,
        encode: Callable[[str], list[int]],
        retry: str,
        *,
        is_retry: bool,
    ) -> Turn:
        """Begin a plain completion, from a text or from ids."""
        if isinstance(prompt, str):
            return self._from_text(prompt, options, encode, retry, is_retry=is_retry)
        ids = list(prompt)
        for node in reversed(self.nodes):
            head = node.ids()
            if len(ids) > len(head) and ids[: len(head)] == head:
                return self._turn(options, node, ids[len(head) :], retry, is_retry=is_retry)
        return self._turn(options, None, ids, retry, is_retry=is_retry)

    def _from_text(
        self,
        prompt: str,
        options: SamplingOptions,
        encode: Callable[[str], list[int]],
        retry: str,
        *,
        is_retry: bool,
    ) -> Turn:
        parent, text = None, prompt
        for node in reversed(self.nodes):
            head = node.whole_text()
            if head is not None and len(prompt) > len(head) and prompt.startswith(head):
                parent, text = node, prompt[len(head) :]
                break
        turn = self._turn(options, parent, encode(text), retry, is_retry=is_retry)
        turn.fresh_text = text
        return turn

    def _turn(
        self, options: SamplingOptions, parent: Node | None, fresh: list[int], retry: str, *, is_retry: bool
    ) -> Turn:
        known = self._retries.get(retry) if is_retry else None
        ordinal = self._calls if known is None else known
        if known is None:
            self._check_limits()
            self._check_room(len(fresh))
            self._calls += 1
            self._retries[retry] = ordinal
        self._attempts[ordinal] = self._attempts.get(ordinal, 0) + 1
        prompt_ids = (parent.ids() if parent is not None else []) + fresh
        return Turn(
            ordinal=ordinal,
            attempt=self._attempts[ordinal],
            prompt_ids=prompt_ids,
            options=self._with_room(options, len(prompt_ids)),
            parent=parent,
            fresh=fresh,
            retry=retry,
            answered=next((node.reply for node in self.nodes if node.ordinal == ordinal), None),
        )

    def _check_room(self, tokens: int) -> None:
        for what, has, most in (
            ("tokens", self.tokens + tokens, self.max_tokens),
            ("calls", self._calls + 1, self.max_calls),
        ):
            if has > most:
                self.limit = what
                text = f"episode {self.id} may hold {most} {what}; end it"
                raise ServiceError(Reason.QUOTA_EXCEEDED, text, quota=[(self.id, f"{most} {what}")])

    def _check_limits(self) -> None:
        """PROMPT_TOO_LONG for one reply too many: agents know that as the end, and do not ask again."""
        if self.limits.calls is not None and len(self.nodes) >= self.limits.calls:
            self.limit = "calls"
            text = f"this episode has had its {self.limits.calls} replies"
            raise ServiceError(Reason.PROMPT_TOO_LONG, text, field="prompt")

    def _with_room(self, options: SamplingOptions, prompt_tokens: int) -> SamplingOptions:
        """The options with the reply as long as the limit of tokens leaves it. PROMPT_TOO_LONG."""
        if self.limits.tokens is None:
            return options
        room = self.limits.tokens - prompt_tokens
        if room < 1:
            self.limit = "tokens"
            text = f"the prompt has {prompt_tokens} tokens, and this episode may have {self.limits.tokens}"
            raise ServiceError(Reason.PROMPT_TOO_LONG, text, field="prompt")
        asked = options.max_tokens
        return replace(options, max_tokens=room if asked is None else min(asked, room))

    @property
    def lost(self) -> str:
        """Why a call was never answered, where that was our fault and the agent went on without; or ""."""
        return next(iter(self._lost.values()), "")

    def failed(self, retry: str, error: ServiceError, *, ours: bool) -> None:
        """A call was not answered. `ours`: it was not the agent's fault."""
        self.failures += 1
        if error.reason is Reason.PROMPT_TOO_LONG and not self.limit:
            self.limit = "tokens"
        full = error.reason is Reason.QUOTA_EXCEEDED and bool(self.limit)
        if ours and not full:
            self._lost[retry] = f"{error.reason}: {error.message}"

    def record(self, turn: Turn, reply: Finished, said: Message | None) -> None:
        """Keep a reply, once for each call. `said` is the message that a chat's agent is given."""
        known = any(node.ordinal == turn.ordinal for node in self.nodes)
        if known or reply.stop_reason is StopReason.CANCELLED:
            return
        text = None if turn.fresh_text is None else turn.fresh_text + reply.text
        node = Node(turn.parent, turn.fresh, reply, turn.ordinal, text)
        self.nodes.append(node)
        self._lost.pop(turn.retry, None)
        self.tokens += len(turn.fresh) + len(reply.tokens.ids)
        if said is not None:
            self.messages = [*turn.messages, said]
            self._known[rolling_digests(self.messages, turn.setting.facts())[-1]] = node
        elif text is not None:
            whole = node.whole_text() or text
            self.messages = [
                Message("user", whole.removesuffix(reply.text)),
                Message("assistant", reply.text),
            ]

    def request_seed(self, ordinal: int) -> int:
        """The seed of a call, as a function of the episode's and its place."""
        digest = hashlib.sha256(f"{self.seed}/{ordinal}".encode()).digest()
        return int.from_bytes(digest[:6], "big")

    # --- what it comes to -----------------------------------------------------------------------------------

    def segments(self) -> list[Segment]:
        """One for each branch, in the order in which branches ended. A token sampled once is trained once."""
        parents = {id(node.parent) for node in self.nodes if node.parent is not None}
        trained: set[int] = set()
        rows = []
        for leaf in self.nodes:
            if id(leaf) in parents:
                continue
            row = _Row()
            for node in leaf.path():
                row.observed(node.prompt)
                row.reply(node.reply, trained=node.ordinal not in trained)
                trained.add(node.ordinal)
            rows.append(row.segment())
        return rows

    def _as_sampled(self, messages: Sequence[Message], digests: Sequence[bytes], node: Node) -> list[Message]:
        """The messages with each reply on the way to `node` as it was sampled: a call of a tool is given to
        agents taken apart, and templates might write it otherwise than the model did.
        """
        path = {id(each) for each in node.path()}
        replaced = []
        for message, digest in zip(messages, digests, strict=False):
            known = self._known.get(digest)
            sampled = known is not None and id(known) in path
            replaced.append(
                Message("assistant", known.reply.text) if sampled and known is not None else message
            )
        return replaced


class _Row:
    """A segment that grows."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[tuple[int, int, int]] = []
        self._sizes: list[int] = []
        self._support: list[int] = []

    def observed(self, ids: Sequence[int]) -> None:
        self._append(ids, 0, [0.0] * len(ids), [0] * len(ids))

    def reply(self, reply: Finished, *, trained: bool) -> None:
        ids = reply.tokens.ids
        if not trained:
            self.observed(ids)
            return
        start = len(self._ids)
        self._spans += [(start + first, start + last, version) for first, last, version in reply.spans]
        self._append(ids, 1, reply.tokens.logprobs, reply.support.sizes or [0] * len(ids))
        self._support += reply.support.ids

    def segment(self) -> Segment:
        support = Support(tuple(self._sizes), tuple(self._support)) if any(self._sizes) else Support()
        return Segment(
            tuple(self._ids), tuple(self._mask), tuple(self._logprobs), tuple(self._spans), support
        )

    def _append(self, ids: Sequence[int], bit: int, logprobs: Sequence[float], sizes: Sequence[int]) -> None:
        self._ids += ids
        self._mask += [bit] * len(ids)
        self._logprobs += logprobs
        self._sizes += sizes


def for_training(options: SamplingOptions) -> SamplingOptions:
    """The options under which a recorded reply is sampled: where ids are cut, the sampler lists those that
    were left. UNSUPPORTED_OPTION, by name, for options under which a reply could not be trained on.
    """
    bad = [name for name, off in _NOT_RECORDED.items() if getattr(options, name) not in (None, off)]
    if bad:
        raise ServiceError(
            Reason.UNSUPPORTED_OPTION,
            "the trainer cannot know the distribution that these options sample from, so a recorded episode "
            "does without: " + ", ".join(bad),
            violations=[(name, "not in a recorded episode") for name in bad],
        )
    cut = options.top_p not in (None, 1.0) or options.min_p not in (None, 0.0)
    listed = options.top_k not in (None, -1)
    if not cut and not listed:
        return options
    return replace(options, return_support=True, top_k=options.top_k if listed else LISTED_TOP_K)
