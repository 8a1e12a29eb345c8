"""Channels to several servers of which one serves, over real servers."""

import asyncio

import grpc
import pytest

from opentinker_kit.auth import AuthPolicy
from opentinker_kit.server import KitServer, build_server
from opentinker_kit.settings import ServerSettings
from opentinker_kit.testing import wait_until
from opentinkerapi.runtime import addresses
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    SchedulerServiceStub,
    add_SchedulerServiceServicer_to_server,
)

SERVICE = "opentinkerapi.scheduler.v1.SchedulerService"


class Named(SchedulerServiceServicer):
    def __init__(self, name: str) -> None:
        self._name = name

    async def GetJob(self, request, context):  # type: ignore[no-untyped-def]
        response = pb.GetJobResponse()
        response.job.name = self._name
        return response


async def start(name: str) -> KitServer:
    auth = AuthPolicy(None, None, {f"/{SERVICE}/GetJob": "caller"})
    server = build_server(
        ServerSettings(drain_s=0.1),
        lambda grpc_server: add_SchedulerServiceServicer_to_server(Named(name), grpc_server),
        service_names=[SERVICE],
        auth=auth,
    )
    await server.start()
    return server


async def test_calls_go_to_the_one_that_serves() -> None:
    first, second = await start("first"), await start("second")
    await second.set_serving(True)
    async with open_channel(f"127.0.0.1:{first.port},localhost:{second.port}") as channel:
        stub = SchedulerServiceStub(channel)

        async def who() -> str:
            return str((await stub.GetJob(pb.GetJobRequest(name="jobs/j"), timeout=5.0)).job.name)

        assert {await who() for _ in range(10)} == {"second"}
        # They change places.
        await second.set_serving(False)
        await first.set_serving(True)

        async def moved() -> bool:
            try:
                return await who() == "first"
            except grpc.RpcError:
                return False

        await wait_until(moved)
        assert {await who() for _ in range(10)} == {"first"}
        # One is gone altogether, and later both are.
        await second.drain()
        assert {await who() for _ in range(10)} == {"first"}
        await first.set_serving(False)
        await asyncio.sleep(0.2)
        with pytest.raises(grpc.RpcError) as refused:
            await who()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    await first.drain()


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("some-host:1", "some-host:1"),
        ("dns:///some-host:1", "dns:///some-host:1"),
        ("10.0.0.1:1, 10.0.0.2:2", "ipv4:10.0.0.1:1,10.0.0.2:2"),
        ("[::1]:1,10.0.0.2:2", "ipv6:[::1]:1,[::ffff:10.0.0.2]:2"),
        ("10.0.0.1:1,no-such-name.invalid:2", "ipv4:10.0.0.1:1"),
    ],
)
def test_what_grpc_calls_an_address(address: str, target: str) -> None:
    assert addresses.target(address) == target
    assert addresses.is_several(address) == ("," in address or address.startswith("dns:///"))


def test_addresses_that_are_none_are_refused() -> None:
    with pytest.raises(OSError, match="none of the names"):
        addresses.target("a.invalid:1,b.invalid:1")
    with pytest.raises(ValueError, match="host:port"):
        addresses.target("a,b")
