"""The sampling side of a policy as its user holds it."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from opentinker import errors
from opentinker.connection.jobs import Job
from opentinker.connection.portal import Pending, Portal
from opentinker.connection.tokenizers import fetch_tokenizer
from opentinker.environments.content import Message
from opentinker.rollout.renderer import make_renderer
from opentinker.sampling import identity
from opentinker.sampling.completion import Completion, Delta
from opentinker.sampling.params import SamplingParams
from opentinker.sampling.sampler import OnSwap, Sampler

if TYPE_CHECKING:
    from opentinkerapi.runtime.render import ChatTokenizer


class Sampled(ABC):
    """What can be sampled from, at any of its versions."""

    def __init__(self, portal: Portal, job: Job, sampler: Sampler) -> None:
        self.portal = portal
        self.job = job
        self.sampler = sampler
        self._tokenizer: ChatTokenizer | None = None
        self.renderer = ""
        """The conversation format that it speaks, by its name (`opentinker.rollout.formats`); "" is that
        of the model's own chat template.
        """

    @property
    @abstractmethod
    def version(self) -> int:
        """The version that is sampled unless another one is named."""

    def sample(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        seed: int | None = None,
        version: int | None = None,
        conversation: str = "",
        on_swap: OnSwap = "drain",
    ) -> Pending[list[Completion]]:
        """n completions of a prompt, by index; completion i is drawn from seed + i.

        `conversation`: any name; where the policy has replicas, requests of one name go to the same server.
        """
        if n < 1:
            raise errors.invalid("n", f"must be at least 1, not {n}")
        stream = self.stream(
            prompt_ids, params, n=n, seed=seed, version=version, conversation=conversation, on_swap=on_swap
        )

        async def collect() -> list[Completion]:
            return sorted([completion async for completion in stream], key=lambda each: each.index)

        return Pending.of(self.portal, collect())

    def stream(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        seed: int | None = None,
        version: int | None = None,
        conversation: str = "",
        on_swap: OnSwap = "drain",
    ) -> AsyncGenerator[Completion, None]:
        """The completions as they finish. On the client's own loop only; `sample` works everywhere."""
        return self.sampler.sample(
            prompt_ids,
            version=self.version if version is None else version,
            params=params or SamplingParams(),
            n=n,
            seed=seed,
            request_id=f"sample-{uuid.uuid4().hex}",
            conversation=conversation,
            on_swap=on_swap,
        )

    async def stream_tokens(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        seed: int | None = None,
        version: int | None = None,
        conversation: str = "",
        on_swap: OnSwap = "drain",
    ) -> AsyncGenerator[Delta | Completion, None]:
        """Tokens and text as they are sampled, and each completion after its last delta. From any loop."""
        source = self.sampler.sample_tokens(
            prompt_ids,
            version=self.version if version is None else version,
            params=params or SamplingParams(),
            n=n,
            seed=seed,
            request_id=f"stream-{uuid.uuid4().hex}",
            conversation=conversation,
            on_swap=on_swap,
        )
        async for event in self.portal.relay(source):
            yield event

    def chat(
        self,
        messages: str | Sequence[Message | Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        version: int | None = None,
    ) -> Pending[str]:
        """The policy's reply to a conversation, or to one user message."""
        if params is not None:
            params.check_tokens_only("params")
        spoken = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages

        async def reply() -> str:
            renderer = make_renderer(await self.tokenizer(), self.renderer)
            said = [Message.of(message) for message in spoken]
            prompt = renderer.first(said)
            completions = await self.sample(
                prompt, params, seed=seed, version=version, conversation=identity.conversation(said)
            )
            return completions[0].text

        return Pending.of(self.portal, reply())

    def score(
        self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0, version: int | None = None
    ) -> Pending[list[NDArray[np.float32]]]:
        """Raw logprobs of given tokens: for each sequence of n ids an array [n] whose entry 0 is NaN."""
        number = self.version if version is None else version
        return Pending.of(self.portal, self.sampler.score(sequences, version=number, temperature=temperature))

    def load(self, version: int | None = None, *, on_swap: OnSwap = "drain") -> Pending[float]:
        """Load a version into the inference server before it is needed; gives the seconds that took it."""
        number = self.version if version is None else version
        return Pending.of(self.portal, self.sampler.load(number, on_swap))

    def tokenizer(self) -> "Pending[ChatTokenizer]":
        """The model's tokenizer and chat template."""

        async def fetch() -> "ChatTokenizer":
            if self._tokenizer is None:
                self._tokenizer = await fetch_tokenizer(self.job)
            return self._tokenizer

        return Pending.of(self.portal, fetch())
