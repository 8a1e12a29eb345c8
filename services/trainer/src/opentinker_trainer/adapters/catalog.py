"""The catalog at the scheduler, and none."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from opentinker_kit.errors import ServiceError
from opentinkerapi.catalog.v1 import catalog_service_pb2, catalog_service_pb2_grpc, policy_pb2
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import from_rpc_error
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tls import TlsFiles, explained

_DEADLINE_S = 10.0


class GrpcCatalog:
    """The scheduler's catalog. The channel is kept, and opened anew where the scheduler's address changed."""

    def __init__(
        self,
        resolve_address: Callable[[], str],
        key: str | None,
        server: Callable[[], str],
        *,
        tls: TlsFiles | None = None,
    ) -> None:
        self._tls = tls
        self._resolve_address = resolve_address
        self._key = key
        self._server = server
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._lock = asyncio.Lock()

    async def register_policy(
        self, request_id: str, policy: policy_pb2.Policy, version: policy_pb2.PolicyVersion, attempt: int
    ) -> None:
        request = catalog_service_pb2.RegisterPolicyRequest(
            request_id=request_id,
            policy=policy,
            server=self._server(),
            attempt=attempt,
            version_sha256=version.sha256,
            version_manifest_key=version.manifest_key,
        )
        await self._call("RegisterPolicy", request)

    async def register_version(self, version: policy_pb2.PolicyVersion, attempt: int, keep: int = 0) -> None:
        request = catalog_service_pb2.RegisterVersionRequest(
            policy=version.policy, version=version, attempt=attempt, keep_versions=keep
        )
        await self._call("RegisterVersion", request)

    async def register_checkpoint(
        self, checkpoint: policy_pb2.Checkpoint, attempt: int, keep: int = 0
    ) -> None:
        request = catalog_service_pb2.RegisterCheckpointRequest(
            policy=checkpoint.policy, checkpoint=checkpoint, attempt=attempt, keep_checkpoints=keep
        )
        await self._call("RegisterCheckpoint", request)

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await self._channel.close()

    async def _call(self, method: str, request: Any) -> None:
        stub = catalog_service_pb2_grpc.CatalogServiceStub(await self._open())
        try:
            await getattr(stub, method)(request, timeout=_DEADLINE_S)
        except grpc.RpcError as error:
            raised = await explained(from_rpc_error(error), self._address, self._tls)
            known = Reason.__members__.get(raised.reason or "", Reason.CONNECTION_LOST)
            if known is Reason.TLS_FAILED:
                # Waited for like a scheduler that is away: its certificate may have expired, and be renewed.
                known = Reason.CONNECTION_LOST
            raise ServiceError(known, f"catalog: {raised.message}", metadata=raised.metadata) from error

    async def _open(self) -> grpc.aio.Channel:
        async with self._lock:
            address = self._resolve_address()
            if self._channel is None or address != self._address:
                if self._channel is not None:
                    await self._channel.close()
                self._channel = open_channel(address, key=self._key, tls=self._tls)
                self._address = address
            return self._channel


class NoCatalog:
    """Where no scheduler runs: manifests in the object store are the only record."""

    async def register_policy(
        self, request_id: str, policy: policy_pb2.Policy, version: policy_pb2.PolicyVersion, attempt: int
    ) -> None:
        return None

    async def register_version(self, version: policy_pb2.PolicyVersion, attempt: int, keep: int = 0) -> None:
        return None

    async def register_checkpoint(
        self, checkpoint: policy_pb2.Checkpoint, attempt: int, keep: int = 0
    ) -> None:
        return None

    async def close(self) -> None:
        return None
