"""Calls of a recorded episode: sampled as the episode says, kept when they are answered."""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterator

import grpc

from opentinker_gateway.domain.book import Entry
from opentinker_gateway.domain.episodes import Turn, for_training
from opentinker_gateway.domain.sampling import Delta, Event, SamplingOptions, Started
from opentinker_gateway.ports import Model
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

_CALLERS_FAULT = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Codes of calls that the agent could have made better; all others are our fault."""


def decided(entry: Entry, options: SamplingOptions) -> SamplingOptions:
    """What the agent asks for, under what the episode's creator decided. An episode has one temperature,
    which the first call settles: INVALID_FIELD for another.
    """
    episode = entry.episode
    options = for_training(dataclasses.replace(options, **episode.overrides))  # type: ignore[arg-type]
    temperature = 1.0 if options.temperature is None else options.temperature
    if episode.temperature is None:
        episode.temperature = temperature
    if temperature != episode.temperature:
        text = (
            f"this episode is sampled at temperature {episode.temperature:g}, from its first call on; "
            f"{temperature:g} would not be trained as it was sampled (give `sampling` when you create an "
            "episode to overrule its agent)"
        )
        raise ServiceError(Reason.INVALID_FIELD, text, field="temperature")
    return dataclasses.replace(options, temperature=temperature)


def one_reply(n: int) -> None:
    """UNSUPPORTED_OPTION for more than one reply to a call: which of them went on nobody could tell."""
    if n != 1:
        raise ServiceError(Reason.UNSUPPORTED_OPTION, "a recorded episode has one reply a call", field="n")


def check_model(entry: Entry, model: str) -> None:
    """UNKNOWN_MODEL unless the agent asks for the episode's own model, by name or as "policy"."""
    known = ("policy", entry.episode.model, entry.episode.weights)
    if model not in known:
        text = f"this episode is played with {entry.episode.model!r} (or say 'policy'), not {model!r}"
        raise ServiceError(Reason.UNKNOWN_MODEL, text, field="model")


async def played(entry: Entry, turn: Turn, model: Model) -> AsyncGenerator[Event, None]:
    """The events of a turn: sampled now, or again as they were where the turn was answered before."""
    if turn.answered is not None:
        reply = turn.answered
        yield Started(len(turn.prompt_ids), len(turn.prompt_ids), turn.options.temperature or 0.0)
        yield Delta(0, reply.text, reply.tokens)
        yield reply
        return
    episode, options = entry.episode, turn.options
    if options.seed is None:
        options = dataclasses.replace(options, seed=episode.request_seed(turn.ordinal))
    events = model.sample(
        turn.prompt_ids,
        options,
        n=1,
        # A name of its own for each try: an earlier one may still be ending.
        request_id=f"episode-{episode.id}-{turn.ordinal}-{turn.attempt}",
        conversation=episode.id,
    )
    async with contextlib.aclosing(events):
        async for event in events:
            yield event


@contextlib.contextmanager
def in_use(entry: Entry, retry: str) -> Iterator[None]:
    """The episode does not expire while a call of it is answered; a call that fails is counted. `retry` is
    equal for a call and its retries.
    """
    entry.calls += 1
    try:
        yield
    except ServiceError as error:
        entry.episode.failed(retry, error, ours=error.code not in _CALLERS_FAULT)
        raise
    finally:
        entry.calls -= 1
