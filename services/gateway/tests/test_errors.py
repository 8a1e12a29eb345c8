"""Whatever comes in, an error has OpenAI's shape and names what is wrong; others are not affected."""

import asyncio
import json
import socket
from typing import Any

import openai
import pytest
from services.gateway.tests.conftest import World
from services.gateway.tests.doubles import BASE, KEY, abort

from opentinker_gateway.wire.bodies import NEUTRAL, ChatBody, TextBody
from opentinkerapi.runtime.reasons import CATALOGUE, Reason
from opentinkerapi.scheduler.v1 import account_pb2

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]
GOOD: dict[str, Any] = {"model": BASE, "messages": HI}


@pytest.mark.parametrize("key", ["wrong", ""])
async def test_without_a_key_nothing_is_told(world: World, key: str) -> None:
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("POST", "/episodes"),
        ("GET", "/episodes/1"),
        ("POST", "/episodes/1/v1/chat/completions"),
    ):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with world.http() as client:
            client.headers.pop("authorization")
            answer = await client.request(method, path, headers=headers, content=b"{")
        assert answer.status_code == 401, path
        error = answer.json()["error"]
        assert error["code"] == "invalid_api_key"
        assert error["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
    with pytest.raises(openai.AuthenticationError):
        await world.client(key="wrong").models.list()
    assert world.scheduler.resolved == []


async def test_a_users_key_is_asked_about_and_a_viewers_only_looks(world: World) -> None:
    world.scheduler.users = {"member-key": account_pb2.ROLE_MEMBER, "viewer-key": account_pb2.ROLE_VIEWER}
    for key in world.scheduler.users:
        assert (await world.client(key=key).models.list()).data
    body = {"model": "mine", "messages": [{"role": "user", "content": "hello"}]}
    async with world.http("member-key") as client:
        assert (await client.post(CHAT, json=body)).status_code == 200
    async with world.http("viewer-key") as client:
        answer = await client.post(CHAT, json=body)
    assert answer.status_code == 403


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"model": NaN}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        json.dumps({**GOOD, "messages": [{"role": "user", "content": "\ud800"}]}).encode(),
    ],
    ids=["empty", "broken", "list", "text", "no utf-8", "nan", "deep list", "deep object", "surrogate"],
)
async def test_malformed_json_is_told_so(world: World, data: bytes) -> None:
    async with world.http() as client:
        for path in (CHAT, "/v1/completions", "/episodes"):
            answer = await client.post(path, content=data)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert (await client.post(CHAT, json=GOOD)).status_code == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "god", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "5"}]}, "messages[0].tool_call_id"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**60}, "seed"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_what_is_wrong_is_named(world: World, change: dict[str, Any], param: str) -> None:
    async with world.http() as client:
        answer = await client.post(CHAT, json={**GOOD, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert world.inference.requests == []


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        *(({name: {"x": 1}}, name) for name in sorted(NEUTRAL)),
        ({"nonsense": 1}, "nonsense"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict",
        ),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_what_is_not_supported_is_refused_by_name(
    world: World, change: dict[str, Any], param: str
) -> None:
    async with world.http() as client:
        answer = await client.post(CHAT, json={**GOOD, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert world.inference.requests == []


async def test_what_asks_for_nothing_is_accepted(world: World) -> None:
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    nulls = {name: None for name in (*NEUTRAL, *ChatBody.model_fields) if name not in GOOD}
    async with world.http() as client:
        assert (await client.post(CHAT, json={**GOOD, **neutral})).status_code == 200
        assert (await client.post(CHAT, json={**GOOD, **nulls})).status_code == 200


def test_no_option_is_both_known_and_refused() -> None:
    assert not set(NEUTRAL) & set(ChatBody.model_fields)
    assert set(NEUTRAL) & set(TextBody.model_fields) == set()


STATUSES = [
    (Reason.INVALID_FIELD, 400),
    (Reason.PROMPT_TOO_LONG, 400),
    (Reason.PERMISSION_DENIED, 403),
    (Reason.VERSION_NOT_FOUND, 404),
    (Reason.REQUEST_ID_REUSED, 409),
    (Reason.OVERLOADED, 429),
    (Reason.INTERNAL, 500),
    (Reason.ENGINE_CRASHED, 503),
    (Reason.DEADLINE_EXCEEDED, 504),
]


@pytest.mark.parametrize(("reason", "status"), STATUSES, ids=lambda value: str(value))
async def test_each_failure_behind_the_gateway_has_its_status(
    world: World, reason: Reason, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(request: Any, context: Any) -> None:
        await abort(context, reason, CATALOGUE[reason].message, "params.top_p")

    # The channel itself tries again too, which takes its time.
    monkeypatch.setattr("opentinker_gateway.adapters.served.TRIES", 1)
    world.inference.before = fail
    for body in (GOOD, {**GOOD, "stream": True}):
        async with world.http() as client:
            answer = await client.post(CHAT, json=body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["message"] == CATALOGUE[reason].message
        assert error["param"] == ("model" if status == 404 else "top_p")
    world.inference.before = None
    assert (await world.client().chat.completions.create(**GOOD)).choices[0].message.content == "hello"


async def test_an_unknown_model_is_not_found(world: World) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await world.client().chat.completions.create(model="gpt-9", messages=HI)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert BASE in caught.value.message


async def test_a_template_that_refuses_names_the_messages(world: World) -> None:
    world.use_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(openai.BadRequestError, match="roles must alternate") as caught:
        await world.client().chat.completions.create(**GOOD)
    assert caught.value.param == "messages"


async def test_routes_that_are_none(world: World) -> None:
    async with world.http() as client:
        for method, path, status in (
            ("GET", "/", 404),
            ("GET", "/docs", 404),
            ("POST", "/v1/embeddings", 404),
            ("GET", CHAT, 405),
        ):
            answer = await client.request(method, path)
            assert answer.status_code == status
            assert path in answer.json()["error"]["message"]


async def test_an_unexpected_failure_tells_its_id_and_nothing_else(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("the secret of the house")

    monkeypatch.setattr("opentinker_gateway.wire.options.messages", explode)
    async with world.http() as client:
        answer = await client.post(CHAT, json=GOOD)
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "error id" in answer.json()["error"]["message"]


@pytest.mark.parametrize("world", [{"max_body_bytes": 2000}], indirect=True)
async def test_a_large_body_is_not_read_to_its_end(world: World) -> None:
    port = int(world.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n".encode())
    # A body that says nothing of its length and has no end.
    writer.write(b"transfer-encoding: chunked\r\n\r\n" + b"3e8\r\n" + b" " * 1000 + b"\r\n")
    writer.write(b"7d0\r\n" + b" " * 2000 + b"\r\n")
    assert b" 413 " in await reader.readline()
    writer.close()
    async with world.http() as client:
        assert (await client.post(CHAT, content=b" " * 3000)).status_code == 413
        assert (await client.post(CHAT, json=GOOD)).status_code == 200


@pytest.mark.parametrize("world", [{"max_requests": 2}], indirect=True)
async def test_too_many_at_once_are_told_to_come_back(world: World) -> None:
    world.inference.gate = asyncio.Event()
    client = world.client()
    streams = [await client.chat.completions.create(**GOOD, stream=True) for _ in range(2)]
    with pytest.raises(openai.RateLimitError) as caught:
        await client.chat.completions.create(**GOOD)
    assert caught.value.response.headers["retry-after"] == "1"
    async with world.http() as http:
        assert (await http.get("/health")).status_code == 200, "health is never crowded out"
    world.inference.gate.set()
    for stream in streams:
        async for _ in stream:
            pass
    assert (await client.chat.completions.create(**GOOD)).choices


@pytest.mark.parametrize("world", [{"write_timeout_s": 1.0}], indirect=True)
async def test_a_reader_that_stops_reading_is_left(world: World) -> None:
    """What is made for it stays in the engine's server, and its slot is freed."""
    world.inference.script, world.inference.endless = ["x" * 20_000], True
    client = world.client()
    listening = world.gateway.server._socket
    assert listening is not None
    # Small buffers, so that not much has to be made to fill them.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(world.url.rpartition(":")[2])))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1)
    body = json.dumps({**GOOD, "stream": True}).encode()
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n".encode())
    writer.write(f"content-length: {len(body)}\r\n\r\n".encode() + body)
    await reader.read(1)
    deadline = asyncio.get_running_loop().time() + 60
    while not world.inference.cancelled and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.1)
        assert (await client.models.list()).data, "others are answered meanwhile"
    assert world.inference.cancelled == [world.inference.requests[-1].request_id]
    # What the buffers of two connections hold, and no more.
    assert world.inference.sent * 20_000 < 64 << 20
    writer.close()
