"""What happens around a call, seen by a client over a real connection."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
import structlog.testing

from opentinker_kit.auth import AuthPolicy, Kind, Principal, Role, current_principal, digest_of
from opentinker_kit.clock import SystemClock
from opentinker_kit.errors import ServiceError
from opentinker_kit.interceptors import EndedCall
from opentinker_kit.job_tokens import INFERENCE as INFERENCE_SERVERS
from opentinker_kit.job_tokens import JobClaims, TokenSigner, TokenVerifier
from opentinker_kit.server import build_server
from opentinker_kit.settings import ServerSettings
from opentinkerapi.data.v1 import blob_pb2, prompt_pb2
from opentinkerapi.inference.v1 import inference_service_pb2, sampling_pb2
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.run.v1 import blob_service_pb2, blob_service_pb2_grpc
from opentinkerapi.run.v1.blob_service_pb2_grpc import BlobServiceStub
from opentinkerapi.runtime import errors
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.trainer.v1 import operation_pb2, trainer_service_pb2
from opentinkerapi.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

from .conftest import BLOB, CALLER_KEY, SERVICE_KEY, Running, Start

UPLOAD = blob_service_pb2.CreateUploadRequest(sha256="ab", size_bytes=1)
DOWNLOAD = blob_service_pb2.GetDownloadRequest(blob=blob_pb2.BlobRef(sha256="ab"))
SAMPLE = inference_service_pb2.SampleRequest(
    request_id="r1",
    model=sampling_pb2.ModelRef(base_model="m"),
    prompt=prompt_pb2.Prompt(chunks=[prompt_pb2.Chunk(tokens=prompt_pb2.TokenChunk(token_ids=b"\0\0\0\0"))]),
)


async def failure(call: Any) -> errors.OpenTinkerError:
    """The typed error that a call ends with."""

    async def run() -> None:
        if hasattr(call, "__aiter__") and not hasattr(call, "__await__"):
            async for _ in call:
                pass
        else:
            await call

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await run()
    return errors.from_rpc_error(caught.value)


class TestErrors:
    async def test_a_service_error_arrives_with_all_its_parts(self, start: Start) -> None:
        running = await start()

        async def full() -> None:
            raise ServiceError(
                Reason.QUOTA_EXCEEDED,
                "3 of 3 slots are in use",
                field="size_bytes",
                metadata={"limit": 3},
                retry_after_s=1.5,
                quota=[("projects/default", "3 slots")],
            )

        running.behavior.upload = full
        async with running.channel() as channel:
            error = await failure(BlobServiceStub(channel).CreateUpload(UPLOAD))
        assert isinstance(error, errors.QuotaExceeded)
        assert isinstance(error, errors.ResourceExhausted)
        assert (error.reason, error.field, error.retry_after_s) == (Reason.QUOTA_EXCEEDED, "size_bytes", 1.5)
        assert error.metadata == {"limit": "3"}
        assert error.message == "3 of 3 slots are in use"

    async def test_an_unexpected_exception_says_its_id_and_nothing_of_its_text(self, start: Start) -> None:
        running = await start()

        async def broken() -> None:
            raise RuntimeError("secret-from-the-database")

        running.behavior.upload = broken
        with structlog.testing.capture_logs() as logs:
            async with running.channel() as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await BlobServiceStub(channel).CreateUpload(UPLOAD)
        error = errors.from_rpc_error(caught.value)
        assert isinstance(error, errors.InternalError)
        assert "secret" not in repr(caught.value) + repr(caught.value.trailing_metadata()) + str(error)
        assert error.error_id
        assert error.error_id in str(error)
        assert any(entry.get("error_id") == error.error_id for entry in logs)

    async def test_a_stream_keeps_what_it_sent_before_it_failed(self, start: Start) -> None:
        running = await start()

        async def lost() -> None:
            raise ServiceError(Reason.ENGINE_CRASHED)

        running.behavior.sample = lost
        async with running.channel() as channel:
            call = InferenceServiceStub(channel).Sample(SAMPLE)
            assert await call.read() == inference_service_pb2.SampleResponse()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert isinstance(errors.from_rpc_error(caught.value), errors.Unavailable)

    async def test_a_method_that_is_not_built_yet_is_unimplemented(self, start: Start) -> None:
        running = await start()
        async with running.channel() as channel:
            stub = InferenceServiceStub(channel)
            error = await failure(stub.ListModels(inference_service_pb2.ListModelsRequest()))
        assert isinstance(error, errors.Unimplemented)
        assert error.reason == Reason.UNIMPLEMENTED

    async def test_long_texts_are_cut_to_what_trailers_can_carry(self, start: Start) -> None:
        running = await start()

        async def verbose() -> None:
            raise ServiceError(
                Reason.INVALID_FIELD, "x" * 100_000, violations=[(f"f{i}", "y" * 9_000) for i in range(500)]
            )

        running.behavior.upload = verbose
        async with running.channel() as channel:
            error = await failure(BlobServiceStub(channel).CreateUpload(UPLOAD))
        assert isinstance(error, errors.InvalidArgument)
        assert error.field == "f0"

    async def test_a_cancelled_call_is_cancelled_in_the_handler(self, start: Start) -> None:
        running = await start()
        entered, cancelled = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            entered.set()
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

        running.behavior.sample = wait
        async with running.channel() as channel:
            call = InferenceServiceStub(channel).Sample(SAMPLE)
            await call.read()
            await entered.wait()
            call.cancel()
            async with asyncio.timeout(5):
                await cancelled.wait()

    async def test_no_server_is_a_connection_error_that_says_so(self, start: Start) -> None:
        running = await start()
        await running.server.drain()
        async with running.channel() as channel:
            error = await failure(BlobServiceStub(channel).CreateUpload(UPLOAD, timeout=10))
        assert isinstance(error, errors.Unavailable)
        assert isinstance(error, ConnectionError)
        assert error.reason == Reason.CONNECTION_LOST


class TestAuth:
    async def test_a_missing_and_a_wrong_key_are_refused_before_anything_is_parsed(
        self, start: Start
    ) -> None:
        running = await start()
        for key, text in ((None, "missing"), ("guess", "wrong")):
            async with running.channel(key) as channel:
                error = await failure(BlobServiceStub(channel).CreateUpload(UPLOAD))
            assert isinstance(error, errors.Unauthenticated)
            assert isinstance(error, PermissionError)
            assert text in error.message
        assert running.behavior.seen == []

    async def test_streams_are_refused_too(self, start: Start) -> None:
        running = await start()
        async with running.channel(None) as channel:
            error = await failure(InferenceServiceStub(channel).Sample(SAMPLE))
            assert isinstance(error, errors.Unauthenticated)
            call = TrainerServiceStub(channel).ForwardBackward(iter([]))
            assert isinstance(await failure(call), errors.Unauthenticated)

    async def test_a_person_may_not_call_what_is_for_services(self, start: Start) -> None:
        running = await start()
        async with running.channel(CALLER_KEY) as channel:
            error = await failure(BlobServiceStub(channel).GetDownload(DOWNLOAD))
        assert isinstance(error, errors.PermissionDenied)
        async with running.channel(SERVICE_KEY) as channel:
            assert (await BlobServiceStub(channel).GetDownload(DOWNLOAD)).url == "get-here"
            assert (await BlobServiceStub(channel).CreateUpload(UPLOAD)).url == "put-here"

    async def test_a_method_without_an_entry_is_denied_even_to_services(self, start: Start) -> None:
        running = await start(auth=AuthPolicy(CALLER_KEY, SERVICE_KEY, {}))
        async with running.channel(SERVICE_KEY) as channel:
            error = await failure(BlobServiceStub(channel).CreateUpload(UPLOAD))
        assert isinstance(error, errors.PermissionDenied)

    async def test_the_handler_knows_who_calls(self, start: Start) -> None:
        running = await start()
        seen = []

        async def look() -> None:
            seen.append(current_principal())

        running.behavior.upload = look
        async with running.channel(CALLER_KEY, job_token="token") as channel:
            await BlobServiceStub(channel).CreateUpload(UPLOAD)
        assert [(who.kind, who.project, who.job_token) for who in seen] == [("caller", "default", "token")]
        assert "token" not in repr(seen).replace("job_token", "")


class TestRequired:
    async def test_missing_fields_are_named(self, start: Start) -> None:
        running = await start()
        async with running.channel() as channel:
            stub = InferenceServiceStub(channel)
            error = await failure(stub.Sample(inference_service_pb2.SampleRequest()))
        assert isinstance(error, errors.RequiredField)
        assert [path for path, _ in error.violations] == ["request_id", "model", "prompt"]
        assert running.behavior.seen == []

    async def test_nested_fields_are_named_by_their_path(self, start: Start) -> None:
        running = await start()
        request = inference_service_pb2.SampleRequest()
        request.CopyFrom(SAMPLE)
        request.model.policy_version.SetInParent()
        request.prompt.chunks.add().image.token_count = 1
        async with running.channel() as channel:
            error = await failure(InferenceServiceStub(channel).Sample(request))
        assert [path for path, _ in error.violations] == [
            "model.policy_version.policy",
            "prompt.chunks[1].image.image",
        ]

    async def test_every_message_of_a_request_stream_is_checked(self, start: Start) -> None:
        running = await start()
        header = operation_pb2.OperationHeader(seq=1, request_id="r")
        first = trainer_service_pb2.ForwardBackwardRequest()
        first.chunk.SetInParent()
        second = trainer_service_pb2.ForwardBackwardRequest(
            start=trainer_service_pb2.ForwardBackwardStart(header=header)
        )
        async with running.channel() as channel:
            error = await failure(TrainerServiceStub(channel).ForwardBackward(iter([second, first])))
        assert error.reason == Reason.REQUIRED_FIELD
        assert "start.header.policy" in dict(error.violations)


class TestSize:
    async def big_call(self, running: Running, size: int) -> errors.OpenTinkerError:
        request = blob_service_pb2.CreateUploadRequest(sha256="a" * size, size_bytes=1)
        options = [("grpc.max_send_message_length", -1)]
        metadata = (("authorization", f"Bearer {CALLER_KEY}"),)
        address = f"127.0.0.1:{running.server.port}"
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            return await failure(BlobServiceStub(channel).CreateUpload(request, metadata=metadata))

    @pytest.mark.parametrize("mebibytes", [17, 70])
    async def test_a_large_message_is_told_what_to_do(self, start: Start, mebibytes: int) -> None:
        running = await start()
        error = await self.big_call(running, mebibytes << 20)
        assert isinstance(error, errors.MessageTooLarge)
        assert "chunks" in error.message
        assert "BlobRef" in error.message
        assert running.behavior.seen == []

    async def test_our_own_channel_refuses_it_with_the_same_advice(self, start: Start) -> None:
        running = await start()
        request = blob_service_pb2.CreateUploadRequest(sha256="a" * (17 << 20), size_bytes=1)
        async with running.channel() as channel:
            error = await failure(BlobServiceStub(channel).CreateUpload(request))
        assert isinstance(error, errors.MessageTooLarge)
        assert "BlobRef" in error.message

    async def test_sixteen_mebibytes_pass(self, start: Start) -> None:
        running = await start()
        request = blob_service_pb2.CreateUploadRequest(sha256="a" * (16 * 1024 * 1024 - 100), size_bytes=1)
        async with running.channel() as channel:
            await BlobServiceStub(channel).CreateUpload(request)


async def test_calls_are_logged_with_their_ids(start: Start) -> None:
    running = await start()

    async def gone() -> None:
        raise ServiceError(Reason.BLOB_NOT_FOUND)

    running.behavior.upload = gone
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
        async with running.channel() as channel:
            stub = BlobServiceStub(channel)
            await failure(stub.CreateUpload(UPLOAD, metadata=(("x-request-id", "call-7"),)))
    entry = next(entry for entry in logs if entry["event"] == "call")
    assert json.dumps(entry)
    assert (entry["outcome"], entry["method"], entry["call"]) == (
        "BLOB_NOT_FOUND",
        "/opentinkerapi.run.v1.BlobService/CreateUpload",
        "call-7",
    )


class Users:
    """Keys of users, as the scheduler knows them."""

    async def find(self, sha256: bytes) -> Principal | None:
        for role in Role:
            if sha256 == digest_of(f"{role}-key"):
                return Principal(Kind.CALLER, project="p1", role=role, user="u1", api_key="k1")
        return None


SIGNER = TokenSigner("secret")
CLAIMS = JobClaims("jobs/j1", "p1", 1, (INFERENCE_SERVERS,), 4e9)
ACCESS = {
    "/opentinkerapi.run.v1.BlobService/CreateUpload": "member",
    "/opentinkerapi.run.v1.BlobService/GetDownload": "admin",
    "/opentinkerapi.inference.v1.InferenceService/Sample": "job",
    "/opentinkerapi.inference.v1.InferenceService/ListModels": "caller",
    "/opentinkerapi.trainer.v1.TrainerService/ForwardBackward": "job",
}


async def _public_keys() -> dict[str, bytes]:
    return {SIGNER.key_id: SIGNER.public_key}


class TestUsersAndJobs:
    def policy(self, *, tokens: bool = True) -> AuthPolicy:
        verifier = TokenVerifier(INFERENCE_SERVERS, _public_keys, SystemClock()) if tokens else None
        return AuthPolicy(CALLER_KEY, SERVICE_KEY, ACCESS, keys=Users(), tokens=verifier)

    async def test_each_role_may_do_what_those_before_it_may(self, start: Start) -> None:
        running = await start(auth=self.policy())
        allowed = {}
        for role in Role:
            async with running.channel(f"{role}-key") as channel:
                stub = BlobServiceStub(channel)
                allowed[role] = []
                for name, call in (
                    ("member", stub.CreateUpload(UPLOAD)),
                    ("admin", stub.GetDownload(DOWNLOAD)),
                ):
                    code = await call.code()
                    if code is grpc.StatusCode.OK:
                        allowed[role].append(name)
                    else:
                        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert allowed == {Role.VIEWER: [], Role.MEMBER: ["member"], Role.ADMIN: ["member", "admin"]}

    async def test_a_token_in_metadata_says_for_which_job(self, start: Start) -> None:
        running = await start(auth=self.policy())
        seen: list[Principal] = []

        async def look() -> None:
            seen.append(current_principal())

        running.behavior.sample = look
        async with running.channel(None, job_token=SIGNER.sign(CLAIMS)) as channel:
            async for _ in InferenceServiceStub(channel).Sample(SAMPLE):
                pass
        assert [(who.job, who.project, who.role) for who in seen] == [("jobs/j1", "p1", Role.MEMBER)]
        assert not seen[0].is_cluster_admin

    async def test_a_failed_call_is_logged_for_its_job_and_nothing_else_is(self, start: Start) -> None:
        running = await start(auth=self.policy())
        bound: list[dict[str, object]] = []

        async def fail() -> None:
            # What a call sets going, an engine for everyone perhaps, is not its job's.
            bound.append(structlog.contextvars.get_contextvars())
            raise ServiceError(Reason.PROMPT_TOO_LONG)

        running.behavior.sample = fail
        with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
            async with running.channel(None, job_token=SIGNER.sign(CLAIMS)) as channel:
                with pytest.raises(grpc.RpcError):
                    async for _ in InferenceServiceStub(channel).Sample(SAMPLE):
                        pass
        entry = next(entry for entry in logs if entry["event"] == "call")
        assert (entry["job"], entry["outcome"]) == ("jobs/j1", "PROMPT_TOO_LONG")
        assert "job" not in bound[0]

    async def test_a_token_in_the_request_counts_before_that_in_metadata(self, start: Start) -> None:
        running = await start(auth=self.policy())
        seen: list[str] = []

        async def look() -> None:
            seen.append(current_principal().job)

        running.behavior.sample = look
        request = inference_service_pb2.SampleRequest()
        request.CopyFrom(SAMPLE)
        request.job_token = SIGNER.sign(replace(CLAIMS, job="jobs/j2"))
        for key, token in (("member-key", None), (None, SIGNER.sign(CLAIMS))):
            async with running.channel(key, job_token=token) as channel:
                async for _ in InferenceServiceStub(channel).Sample(request):
                    pass
        assert seen == ["jobs/j2", "jobs/j2"]

    async def test_a_key_alone_is_for_no_job(self, start: Start) -> None:
        running = await start(auth=self.policy())
        first = trainer_service_pb2.ForwardBackwardRequest()
        first.chunk.SetInParent()
        for key in ("member-key", CALLER_KEY):
            async with running.channel(key) as channel:
                error = await failure(InferenceServiceStub(channel).Sample(SAMPLE))
                assert (error.reason, error.violations[0][0]) == (Reason.UNAUTHENTICATED, "job_token")
                error = await failure(TrainerServiceStub(channel).ForwardBackward(iter([first])))
                assert error.reason == Reason.UNAUTHENTICATED
        assert running.behavior.seen == []
        async with running.channel(SERVICE_KEY) as channel:
            async for _ in InferenceServiceStub(channel).Sample(SAMPLE):
                pass

    async def test_where_tokens_are_not_required_they_are_not_looked_at(self, start: Start) -> None:
        running = await start(auth=self.policy(tokens=False))
        async with running.channel(CALLER_KEY, job_token="whatever") as channel:
            async for _ in InferenceServiceStub(channel).Sample(SAMPLE):
                pass
        assert len(running.behavior.seen) == 1


async def test_an_observer_is_told_how_calls_ended() -> None:
    ended: list[EndedCall] = []
    policy = AuthPolicy(CALLER_KEY, SERVICE_KEY, {f"/{BLOB}/CreateUpload": "member"}, keys=Users())
    server = build_server(
        ServerSettings(),
        lambda server: blob_service_pb2_grpc.add_BlobServiceServicer_to_server(_Gone(), server),
        service_names=[BLOB],
        auth=policy,
        observer=ended.append,
    )
    port = await server.start()
    for key in ("wrong", "viewer-key", "member-key"):
        async with open_channel(f"127.0.0.1:{port}", key=key) as channel:
            await failure(BlobServiceStub(channel).CreateUpload(UPLOAD))
    await server.drain()
    told = [(call.outcome, call.principal and call.principal.caller, call.request) for call in ended]
    assert told == [
        ("UNAUTHENTICATED", None, None),
        ("PERMISSION_DENIED", "users/u1", None),
        ("BLOB_NOT_FOUND", "users/u1", UPLOAD),
    ]
    assert all(call.peer for call in ended)


class _Gone(blob_service_pb2_grpc.BlobServiceServicer):
    async def CreateUpload(self, request: Any, context: Any) -> blob_service_pb2.CreateUploadResponse:
        raise ServiceError(Reason.BLOB_NOT_FOUND)
