"""One contract for object stores, run on memory and on a real S3 server."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import urllib3

from opentinker_kit.errors import ServiceError
from opentinker_kit.objects import MemoryObjectStore, ObjectStore, S3ObjectStore
from opentinker_kit.processes import free_port
from opentinker_kit.settings import S3Settings
from opentinker_kit.testing import start_weed
from opentinkerapi.runtime.reasons import Reason


class ObjectStoreContract:
    """What every object store does; subclasses say which one."""

    async def test_put_get_head(self, store: ObjectStore) -> None:
        info = await store.put("policies/p/ops/1", b"hello", content_type="text/plain")
        assert (info.key, info.size_bytes) == ("policies/p/ops/1", 5)
        assert await store.get("policies/p/ops/1") == b"hello"
        found = await store.head("policies/p/ops/1")
        assert found is not None
        assert (found.key, found.size_bytes, found.etag) == (info.key, 5, info.etag)

    async def test_put_replaces(self, store: ObjectStore) -> None:
        await store.put("a", b"one")
        await store.put("a", b"three")
        assert await store.get("a") == b"three"

    async def test_empty_objects_are_objects(self, store: ObjectStore) -> None:
        await store.put("empty", b"")
        assert await store.get("empty") == b""

    async def test_files_go_in_and_out(self, store: ObjectStore, tmp_path: Path) -> None:
        data = bytes(range(256)) * 40_000
        (tmp_path / "in").write_bytes(data)
        await store.put("file", tmp_path / "in")
        await store.get_to_file("file", tmp_path / "deep" / "out")
        assert (tmp_path / "deep" / "out").read_bytes() == data

    async def test_what_is_not_there(self, store: ObjectStore, tmp_path: Path) -> None:
        assert await store.head("missing") is None
        await store.delete("missing")
        for attempt in (store.get("missing"), store.get_to_file("missing", tmp_path / "out")):
            with pytest.raises(ServiceError) as caught:
                await attempt
            assert caught.value.reason == Reason.BLOB_NOT_FOUND
        assert not (tmp_path / "out").exists()

    async def test_list_is_by_prefix_and_in_key_order(self, store: ObjectStore) -> None:
        for key in ("ops/000000000010", "ops/000000000009", "opsx", "other/1"):
            await store.put(key, key.encode())
        assert [info.key for info in await store.list("ops/")] == ["ops/000000000009", "ops/000000000010"]
        assert await store.list("nothing/") == []

    async def test_delete(self, store: ObjectStore) -> None:
        await store.put("gone", b"x")
        await store.delete("gone")
        assert await store.head("gone") is None

    async def test_put_if_absent_stores_once(self, store: ObjectStore, tmp_path: Path) -> None:
        (tmp_path / "second").write_bytes(b"second")
        assert await store.put_if_absent("manifest", b"first")
        assert not await store.put_if_absent("manifest", tmp_path / "second")
        assert await store.get("manifest") == b"first"

    async def test_put_if_absent_has_one_winner(self, store: ObjectStore) -> None:
        won = await asyncio.gather(*(store.put_if_absent("race", b"%d" % i) for i in range(16)))
        assert won.count(True) == 1
        assert await store.get("race") == b"%d" % won.index(True)


class TestMemory(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryObjectStore()


class TestS3(ObjectStoreContract):
    @pytest.fixture
    async def store(self, s3: S3Settings) -> AsyncIterator[ObjectStore]:
        store = S3ObjectStore(s3)
        yield store
        await asyncio.gather(*(store.delete(info.key) for info in await store.list("")))

    async def test_many_keys_are_listed(self, store: ObjectStore) -> None:
        keys = [f"many/{i:04d}" for i in range(1100)]
        await asyncio.gather(*(store.put(key, b"x") for key in keys))
        assert [info.key for info in await store.list("many/")] == keys

    async def test_presigned_urls_need_no_credentials(self, store: ObjectStore) -> None:
        http = urllib3.PoolManager()
        signed = await store.presign_put("blob", 60)
        assert http.request("PUT", signed.url, body=b"data", headers=dict(signed.headers)).status == 200
        assert http.request("GET", await store.presign_get("blob", 60)).data == b"data"

    async def test_a_conditional_presigned_put_answers_412_the_second_time(self, store: ObjectStore) -> None:
        http = urllib3.PoolManager()
        signed = await store.presign_put("once", 60, if_none_match=True)
        assert signed.headers == {"If-None-Match": "*"}
        codes = [
            http.request("PUT", signed.url, body=body, headers=dict(signed.headers)).status
            for body in (b"first", b"second")
        ]
        assert codes == [200, 412]
        assert await store.get("once") == b"first"

    async def test_a_presigned_put_with_a_hash_takes_no_other_bytes(self, store: ObjectStore) -> None:
        http = urllib3.PoolManager()
        signed = await store.presign_put("hashed", 60, sha256=hashlib.sha256(b"right").hexdigest())
        assert http.request("PUT", signed.url, body=b"wrong").status == 400
        assert await store.head("hashed") is None
        assert http.request("PUT", signed.url, body=b"right").status == 200

    @pytest.mark.parametrize("sent", [0, 100])
    async def test_a_put_that_breaks_off_leaves_nothing(self, store: ObjectStore, sent: int) -> None:
        body = b"{" + b" " * 998 + b"}"
        signed = await store.presign_put("torn", 60, sha256=hashlib.sha256(body).hexdigest())
        url = urlsplit(signed.url)
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        request = f"PUT {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n"
        writer.write(f"{request}Content-Length: {len(body)}\r\n\r\n".encode() + body[:sent])
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()
        await asyncio.sleep(0.5)
        assert await store.head("torn") is None
        assert await store.put_if_absent("torn", body)

    async def test_presigned_urls_name_the_public_endpoint(self, s3: S3Settings) -> None:
        public = s3.model_copy(update={"public_endpoint": "https://objects.example.org"})
        store = S3ObjectStore(public)
        signed = await store.presign_put("x", 60)
        assert signed.url.startswith("https://objects.example.org/")

    async def test_ensure_bucket_may_be_repeated(self, s3: S3Settings) -> None:
        store = S3ObjectStore(s3.model_copy(update={"bucket": "another-bucket"}))
        await store.ensure_bucket()
        await store.ensure_bucket()
        await store.put("x", b"x")

    async def test_a_wrong_secret_reads_nothing(self, s3: S3Settings, tmp_path: Path) -> None:
        wrong = tmp_path / "wrong.key"
        wrong.write_text("wrong-secret")
        wrong.chmod(0o600)
        store = S3ObjectStore(s3.model_copy(update={"secret_key_file": wrong}))
        with pytest.raises(ServiceError) as caught:
            await store.get("x")
        assert caught.value.reason == Reason.STORAGE_UNAVAILABLE


async def test_no_server_is_a_typed_error(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("s")
    secret.chmod(0o600)
    store = S3ObjectStore(
        S3Settings(endpoint=f"127.0.0.1:{free_port()}", access_key="a", secret_key_file=secret), patience=1
    )
    with pytest.raises(ServiceError) as caught:
        await store.get("x")
    assert caught.value.reason == Reason.STORAGE_UNAVAILABLE
    assert caught.value.retry_after_s


async def test_a_restarting_server_is_waited_for_and_keeps_its_objects(tmp_path: Path) -> None:
    with start_weed(tmp_path) as server:
        store = S3ObjectStore(server.settings)
        await store.put("kept", b"bytes")
        server.kill()
        reading = asyncio.create_task(store.get("kept"))
        await asyncio.to_thread(server.restart)
        async with asyncio.timeout(10):
            assert await reading == b"bytes"


async def test_a_full_server_is_a_typed_error_and_loses_nothing(tmp_path: Path) -> None:
    with start_weed(tmp_path, volume_size_mb=8, max_volumes=1) as server:
        store = S3ObjectStore(server.settings, patience=1)
        kept: list[str] = []

        async def fill() -> None:
            for index in range(10):
                await store.put(f"k{index}", bytes([index]) * (3 << 20))
                kept.append(f"k{index}")

        with pytest.raises(ServiceError) as caught:
            await fill()
        assert caught.value.reason in (Reason.STORAGE_FULL, Reason.STORAGE_UNAVAILABLE)
        assert "full" in caught.value.message or "no room" in caught.value.message
        assert kept
        for index, key in enumerate(kept):
            assert await store.get(key) == bytes([index]) * (3 << 20)
        assert await store.head(f"k{len(kept)}") is None
