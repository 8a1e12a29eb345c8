"""Routes of recorded episodes."""

from typing import Any

from fastapi.responses import JSONResponse, Response
from google.protobuf import json_format

from opentinker_gateway.domain.book import Entry, EpisodeBook
from opentinker_gateway.domain.callers import Caller
from opentinker_gateway.domain.episodes import EpisodeLimits
from opentinker_gateway.ports import Models
from opentinker_gateway.wire.bodies import EpisodeBody, parse, read_json
from opentinker_gateway.wire.options import overrides
from opentinker_gateway.wire.trajectories import trajectory_pb

PROTOBUF = "application/x-protobuf"


class Episodes:
    """Makes, shows and ends episodes."""

    def __init__(self, models: Models, book: EpisodeBook) -> None:
        self._models = models
        self._book = book

    async def create(self, data: bytes, caller: Caller) -> Response:
        """POST /episodes: the weights are settled now, whatever the name stands for later."""
        body = parse(EpisodeBody, read_json(data))
        decided = overrides(body.sampling)
        model = await self._models.open(body.model, caller)
        entry = self._book.create(
            body.request_id,
            caller,
            model=body.model,
            weights=model.weights,
            group=body.group,
            seed=body.seed,
            overrides=decided,
            limits=EpisodeLimits(body.max_calls, body.max_tokens),
        )
        return JSONResponse({**self._facts(entry), "api_key": entry.token}, 201)

    def show(self, entry: Entry) -> Response:
        """GET /episodes/{id}."""
        return JSONResponse(self._facts(entry))

    def trajectory(self, entry: Entry, accept: str) -> Response:
        """GET /episodes/{id}/trajectory: a data.v1.Trajectory, in JSON or in its own bytes."""
        message = trajectory_pb(entry.episode)
        if PROTOBUF in accept:
            return Response(message.SerializeToString(), media_type=PROTOBUF)
        return Response(json_format.MessageToJson(message), media_type="application/json")

    def end(self, entry: Entry, caller: Caller) -> Response:
        """DELETE /episodes/{id}."""
        self._book.end(entry.episode.id, caller)
        return Response(status_code=204)

    def _facts(self, entry: Entry) -> dict[str, Any]:
        episode = entry.episode
        return {
            "id": episode.id,
            "object": "episode",
            "model": episode.model,
            "weights": episode.weights,
            "group": episode.group,
            "base_path": f"/episodes/{episode.id}/v1",
            "turns": len(episode.nodes),
            "tokens": episode.tokens,
            "failures": episode.failures,
            "lost": episode.lost,
            "limit": episode.limit,
            "idle_s": self._book.idle_s(),
        }
