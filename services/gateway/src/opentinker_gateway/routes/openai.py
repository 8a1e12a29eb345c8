"""OpenAI's routes, on their own and below an episode."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from opentinker_gateway.application.asks import Ask, End, Piece, Run, TextPiece
from opentinker_gateway.application.chat import Chat
from opentinker_gateway.application.merging import merged
from opentinker_gateway.application.text import Text
from opentinker_gateway.domain.sampling import PromptScores, Waiting
from opentinker_gateway.ports import ListedModel, Model
from opentinker_gateway.routes.http import EventStream, explained, unless_left
from opentinker_gateway.wire import replies
from opentinker_gateway.wire.bodies import ChatBody, TextBody, parse, read_json
from opentinker_gateway.wire.errors import HttpError, http_error
from opentinker_gateway.wire.replies import ChatChoices, Envelope, Vocabulary
from opentinker_gateway.wire.text_replies import TextChoices
from opentinker_kit.clock import Clock
from opentinkerapi.runtime.together import together

LEFT = Response(status_code=499)
"""For the log: the client has gone and reads nothing any more."""


class OpenAi:
    """Answers in OpenAI's shapes."""

    def __init__(self, chat: Chat, text: Text, clock: Clock, write_timeout_s: float) -> None:
        self._chat = chat
        self._text = text
        self._clock = clock
        self._write_timeout_s = write_timeout_s

    async def chat(self, request: Request, data: bytes, ask: Ask) -> Response:
        """POST /v1/chat/completions."""
        body = parse(ChatBody, read_json(data))
        begun = await unless_left(request, self._chat.answer(body, ask))
        if begun is None:
            return LEFT
        run, model = begun
        vocabulary = Vocabulary(model.prompts.tokenizer)
        if body.stream:
            head = self._head("chatcmpl", run.id, "chat.completion.chunk", body.model, model)
            return self._stream(_chat_events(body, run, vocabulary, head), chat=True)
        found = ChatChoices(body.n, vocabulary, logprobs=body.logprobs)
        sampled = await unless_left(request, _collect([run], found))
        if sampled is None:
            return LEFT
        head = self._head("chatcmpl", run.id, "chat.completion", body.model, model)
        return JSONResponse(head.whole(found.choices(), replies.usage([run.started], sampled)))

    async def text(self, request: Request, data: bytes, ask: Ask) -> Response:
        """POST /v1/completions."""
        body = parse(TextBody, read_json(data))
        begun = await unless_left(request, self._text.answer(body, ask))
        if begun is None:
            return LEFT
        runs, prompt_ids, model = begun
        tokenizer = model.prompts.tokenizer
        prompts = [
            tokenizer.decode(ids, skip_special_tokens=False) if body.echo else "" for ids in prompt_ids
        ]
        vocabulary = Vocabulary(tokenizer)
        found = TextChoices(
            prompts, prompt_ids, body.n, vocabulary, echo=body.echo, logprobs=body.logprobs is not None
        )
        head = self._head("cmpl", runs[0].id, "text_completion", body.model, model)
        if body.stream:
            return self._stream(_text_events(body, runs, found, head), chat=False)
        sampled = await unless_left(request, _collect(runs, found))
        if sampled is None:
            return LEFT
        return JSONResponse(
            head.whole(found.choices(), replies.usage([run.started for run in runs], sampled))
        )

    def _head(self, prefix: str, run_id: str, kind: str, name: str, model: Model) -> Envelope:
        created = int(self._clock.now().timestamp())
        return Envelope(prefix, run_id, kind, created, name, model.weights)

    def _stream(self, events: AsyncGenerator[bytes, None], *, chat: bool) -> Response:
        def on_error(error: BaseException) -> HttpError:
            return http_error(explained(error), chat=chat)

        return EventStream(events, on_error, self._write_timeout_s)


def listing(models: Sequence[ListedModel]) -> dict[str, Any]:
    """Of GET /v1/models."""
    return {"object": "list", "data": [model_object(each) for each in models]}


def model_object(model: ListedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": model.owner,
        "root": model.root,
    }


async def _collect(runs: Sequence[Run[Piece]], found: ChatChoices | TextChoices) -> int:
    """Take all pieces of all runs; how many tokens were sampled."""

    async def take(place: int, run: Run[Piece]) -> int:
        sampled = 0
        async with contextlib.aclosing(run.pieces) as pieces:
            async for piece in pieces:
                if isinstance(piece, PromptScores) and isinstance(found, TextChoices):
                    found.scores(place, piece)
                found.add(piece)
                if isinstance(piece, End):
                    sampled += len(piece.finished.tokens.ids)
        return sampled

    return sum(await together([take(place, run) for place, run in enumerate(runs)]))


async def _chat_events(
    body: ChatBody, run: Run[Piece], vocabulary: Vocabulary, head: Envelope
) -> AsyncGenerator[bytes, None]:
    wanted = body.stream_options is not None and body.stream_options.include_usage
    sampled = 0
    yield head.chunk([replies.first_delta(index) for index in range(body.n)], None, wanted)
    async with contextlib.aclosing(run.pieces) as pieces:
        async for piece in pieces:
            if isinstance(piece, Waiting):
                yield replies.KEEP_ALIVE
                continue
            if isinstance(piece, End):
                sampled += len(piece.finished.tokens.ids)
            choice = replies.chat_delta(piece, vocabulary, logprobs=body.logprobs)
            if choice is not None:
                yield head.chunk([choice], None, wanted)
    if wanted:
        yield head.chunk([], replies.usage([run.started], sampled), wanted)
    yield replies.DONE


async def _text_events(
    body: TextBody, runs: Sequence[Run[Piece]], found: TextChoices, head: Envelope
) -> AsyncGenerator[bytes, None]:
    wanted = body.stream_options is not None and body.stream_options.include_usage
    sampled = 0
    async with contextlib.aclosing(merged([run.pieces for run in runs])) as pieces:
        async for place, piece in pieces:
            if isinstance(piece, Waiting):
                yield replies.KEEP_ALIVE
                continue
            if isinstance(piece, PromptScores):
                found.scores(place, piece)
            if isinstance(piece, End):
                sampled += len(piece.finished.tokens.ids)
            choice = found.delta(piece) if isinstance(piece, TextPiece | End) else None
            if choice is not None:
                yield head.chunk([choice], None, wanted)
    if wanted:
        yield head.chunk([], replies.usage([run.started for run in runs], sampled), wanted)
    yield replies.DONE
