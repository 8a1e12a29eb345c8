"""The HTTP application: which path is which route, behind the same door."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from opentinker_gateway.application.chat import Chat
from opentinker_gateway.application.text import Text
from opentinker_gateway.domain.book import BookLimits, EpisodeBook
from opentinker_gateway.ports import ListedModel, Models
from opentinker_gateway.routes.episodes import Episodes
from opentinker_gateway.routes.http import READ, USE, Door, ask_of, error_response, explained
from opentinker_gateway.routes.openai import OpenAi, listing, model_object
from opentinker_gateway.settings import GatewaySettings
from opentinker_kit.auth import Access, AuthPolicy, KeySource
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason


class _Route(APIRoute):
    """A route whose every failure has OpenAI's shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                return error_response(explained(error), chat=request.url.path.endswith("/chat/completions"))

        return handle


class _Crowd:
    """So many requests at once, to the end of their streams."""

    def __init__(self, app: Any, most: int) -> None:
        self._app = app
        self._most = most
        self._inside = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/health"):
            await self._app(scope, receive, send)
            return
        if self._inside >= self._most:
            text = f"{self._most} requests are being answered already"
            refusal = error_response(ServiceError(Reason.OVERLOADED, text, retry_after_s=1.0))
            await refusal(scope, receive, send)
            return
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1


def build_app(
    settings: GatewaySettings, models: Models, clock: Clock, keys: KeySource | None = None
) -> FastAPI:
    """Every route, wired. `keys` knows the keys of users."""
    # The generated documentation would tell everyone what needs a key.
    app = FastAPI(title="OpenTinker gateway", docs_url=None, redoc_url=None, openapi_url=None)
    limits = BookLimits(
        episodes=settings.max_episodes,
        tokens_per_episode=settings.max_episode_tokens,
        tokens=settings.max_recorded_tokens,
        calls_per_episode=settings.max_episode_calls,
        idle_s=settings.episode_idle_s,
    )
    book = EpisodeBook(limits, clock)
    access = {READ: Access.CALLER, USE: Access.MEMBER}
    auth = AuthPolicy(settings.bootstrap_key(), settings.service_key(), access, keys=keys)
    door = Door(auth, book, settings.max_body_bytes)
    openai = OpenAi(Chat(models), Text(models), clock, settings.write_timeout_s)
    app.include_router(_health(models))
    app.include_router(_openai(door, models, openai))
    app.include_router(_episodes(door, Episodes(models, book), openai))
    app.add_middleware(_Crowd, most=settings.max_requests)
    for status in (404, 405):
        app.add_exception_handler(status, _no_route)
    return app


def _health(models: Models) -> APIRouter:
    router = APIRouter(route_class=_Route)

    @router.get("/health/live")
    async def live() -> Response:
        return JSONResponse({"status": "live"})

    @router.get("/health")
    async def ready() -> Response:
        serving = await models.ready()
        return JSONResponse({"status": "serving" if serving else "not_serving"}, 200 if serving else 503)

    return router


def _openai(door: Door, models: Models, openai: OpenAi) -> APIRouter:
    router = APIRouter(prefix="/v1", route_class=_Route)

    @router.get("/models")
    async def list_models(request: Request) -> Response:
        return JSONResponse(listing(await models.list(await door.caller(request, READ))))

    @router.get("/models/{name:path}")
    async def get_model(request: Request, name: str) -> Response:
        return JSONResponse(model_object(await models.describe(name, await door.caller(request, READ))))

    @router.post("/chat/completions")
    async def chat(request: Request) -> Response:
        caller = await door.caller(request)
        data = await door.body(request)
        return await openai.chat(request, data, ask_of(request, caller, data))

    @router.post("/completions")
    async def text(request: Request) -> Response:
        caller = await door.caller(request)
        data = await door.body(request)
        return await openai.text(request, data, ask_of(request, caller, data))

    return router


def _episodes(door: Door, episodes: Episodes, openai: OpenAi) -> APIRouter:
    router = APIRouter(prefix="/episodes", route_class=_Route)

    @router.post("")
    async def create(request: Request) -> Response:
        caller = await door.caller(request)
        return await episodes.create(await door.body(request), caller)

    @router.get("/{identifier}")
    async def show(request: Request, identifier: str) -> Response:
        return episodes.show(door.book.get(identifier, await door.caller(request)))

    @router.get("/{identifier}/trajectory")
    async def trajectory(request: Request, identifier: str) -> Response:
        entry = door.book.get(identifier, await door.caller(request))
        return episodes.trajectory(entry, request.headers.get("accept", ""))

    @router.delete("/{identifier}")
    async def end(request: Request, identifier: str) -> Response:
        caller = await door.caller(request)
        return episodes.end(door.book.get(identifier, caller), caller)

    @router.get("/{identifier}/v1/models")
    async def list_models(request: Request, identifier: str) -> Response:
        episode = (await door.entry(request, identifier)).episode
        return JSONResponse(listing([ListedModel(episode.model, 0, "opentinker", episode.weights)]))

    @router.post("/{identifier}/v1/chat/completions")
    async def chat(request: Request, identifier: str) -> Response:
        entry = await door.entry(request, identifier)
        data = await door.body(request)
        return await openai.chat(request, data, ask_of(request, entry.creator, data, entry))

    @router.post("/{identifier}/v1/completions")
    async def text(request: Request, identifier: str) -> Response:
        entry = await door.entry(request, identifier)
        data = await door.body(request)
        return await openai.text(request, data, ask_of(request, entry.creator, data, entry))

    return router


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    problem = "no such route" if status == 404 else f"{request.method} is not for this route"
    body = {
        "message": f"{problem}: {request.method} {request.url.path}",
        "type": "invalid_request_error",
        "param": None,
        "code": "unknown_url" if status == 404 else "method_not_allowed",
    }
    return JSONResponse({"error": body}, status)
