"""Plain completions: of texts or of token ids, several prompts in one request."""

import contextlib
import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from opentinker_gateway.application.asks import Ask, End, Piece, Run, TextPiece, accepted
from opentinker_gateway.application.recording import check_model, decided, in_use, one_reply, played
from opentinker_gateway.domain.book import Entry
from opentinker_gateway.domain.episodes import Turn
from opentinker_gateway.domain.sampling import Delta, Event, Finished, Started, StopReason
from opentinker_gateway.ports import Model, Models
from opentinker_gateway.wire import options as read
from opentinker_gateway.wire.bodies import MAX_CHOICES, MAX_PROMPTS, TextBody
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.together import together

Prompt = str | list[int]


class Text:
    """Answers plain completions."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def answer(self, body: TextBody, ask: Ask) -> tuple[list[Run[Piece]], list[list[int]], Model]:
        """Begin to answer: a run for each prompt, and the prompts as ids."""
        prompts = _prompts(body)
        if ask.entry is not None:
            with in_use(ask.entry, ask.retry):
                return await self._recorded(body, prompts, ask, ask.entry)
        model = await self._models.open(body.model, ask.caller)
        options = read.text_options(body)
        encoded = [_ids(prompt, model, index, body) for index, prompt in enumerate(prompts)]
        streams, runs = [], []
        for index, ids in enumerate(encoded):
            request_id = ask.request_id(f"text/{index}")
            # As if all choices came from one request: choice i is drawn from seed + i.
            seed = None if options.seed is None else options.seed + index * body.n
            events = model.sample(
                ids,
                replace(options, seed=seed),
                n=body.n,
                request_id=request_id,
                conversation=body.prompt_cache_key or hashlib.sha256(str(ids[:64]).encode()).hexdigest()[:32],
                keep=ask.repeatable,
            )
            streams.append((request_id, events, index * body.n))
        try:
            started = await together([accepted(events) for _, events, _ in streams])
        except BaseException:
            for _, events, _ in streams:
                with contextlib.suppress(RuntimeError):
                    await events.aclose()
            raise
        for (request_id, events, first), begun in zip(streams, started, strict=True):
            runs.append(Run(request_id, begun, model.weights, _pieces(events, first)))
        return runs, encoded, model

    async def _recorded(
        self, body: TextBody, prompts: Sequence[Prompt], ask: Ask, entry: Entry
    ) -> tuple[list[Run[Piece]], list[list[int]], Model]:
        check_model(entry, body.model)
        one_reply(body.n)
        if len(prompts) != 1 or body.echo:
            field = "echo" if body.echo else "prompt"
            text = "a recorded episode completes one prompt a call, without echo"
            raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field=field)
        model = await self._models.open(entry.episode.weights, entry.creator)
        options = decided(entry, read.text_options(body))
        _ids(prompts[0], model, 0, body)
        encode = model.prompts.tokenizer.encode
        turn = entry.episode.text_turn(prompts[0], options, encode, ask.retry, is_retry=ask.is_retry)
        events = played(entry, turn, model)
        try:
            started = await accepted(events)
        except BaseException:
            await events.aclose()
            raise
        base = f"{entry.episode.id}-{turn.ordinal}"
        run = Run(base, started, model.weights, _keeping(entry, turn, events))
        return [run], [turn.prompt_ids], model


async def _keeping(
    entry: Entry, turn: Turn, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[Piece, None]:
    with in_use(entry, turn.retry):
        async with contextlib.aclosing(_pieces(events, 0)) as pieces:
            async for piece in pieces:
                if isinstance(piece, End):
                    entry.episode.record(turn, piece.finished, None)
                yield piece


async def _pieces(events: AsyncGenerator[Event, None], first: int) -> AsyncGenerator[Piece, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                yield TextPiece(first + event.index, event.text, event.tokens)
            elif isinstance(event, Finished):
                if event.stop_reason is StopReason.CANCELLED:
                    raise ServiceError(Reason.CANCELLED, "the completion was cancelled")
                reason = "length" if event.stop_reason is StopReason.LENGTH else "stop"
                yield End(first + event.index, reason, event)
            elif not isinstance(event, Started):
                yield event


def _prompts(body: TextBody) -> list[Prompt]:
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]
    if not given:
        raise ServiceError(Reason.INVALID_FIELD, "prompt is empty", field="prompt")
    if len(given) > MAX_PROMPTS or len(given) * body.n > MAX_CHOICES:
        text = f"at most {MAX_PROMPTS} prompts, and {MAX_CHOICES} choices in all"
        raise ServiceError(Reason.INVALID_FIELD, text, field="prompt")
    return list(given)  # type: ignore[arg-type]


def _ids(prompt: Prompt, model: Model, index: int, body: TextBody) -> list[int]:
    ids = model.prompts.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    where = "prompt" if isinstance(body.prompt, str) or len(_prompts(body)) == 1 else f"prompt[{index}]"
    if not ids:
        raise ServiceError(Reason.INVALID_FIELD, f"{where} is empty", field=where)
    bad = next((token for token in ids if not 0 <= token < 2**31), None)
    if bad is not None:
        text = f"{where}: {bad} is no token id"
        raise ServiceError(Reason.INVALID_FIELD, text, field=where)
    return ids
