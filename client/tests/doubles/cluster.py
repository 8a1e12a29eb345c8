"""All doubles behind one port, in a thread of their own, and a client connected to them."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio
from client.tests.doubles.catalog import CatalogDouble
from client.tests.doubles.inference import InferenceDouble
from client.tests.doubles.scheduler import SchedulerDouble
from client.tests.doubles.trainer import TrainerDouble

from opentinker.connection.calls import ControlPlane
from opentinker.connection.cluster import Cluster
from opentinker.connection.portal import Portal
from opentinkerapi.catalog.v1.catalog_service_pb2_grpc import add_CatalogServiceServicer_to_server
from opentinkerapi.inference.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from opentinkerapi.run.v1.run_service_pb2_grpc import add_RunServiceServicer_to_server
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import add_SchedulerServiceServicer_to_server
from opentinkerapi.trainer.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server


class World:
    """The doubles, and the cluster object of a client. They share the client's loop: grpc.aio wants one
    loop.
    """

    def __init__(self, portal: Portal, inference: InferenceDouble) -> None:
        self.portal = portal
        self.scheduler = SchedulerDouble()
        self.catalog = CatalogDouble(self.scheduler)
        self.trainer = TrainerDouble()
        self.inference = inference
        self._server: grpc.aio.Server | None = None
        self._replicas: list[grpc.aio.Server] = []
        self._port = 0
        self.cluster: Cluster

    async def start(self) -> None:
        """Serve; the same port again after `stop`."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_SchedulerServiceServicer_to_server(self.scheduler, server)
        add_RunServiceServicer_to_server(self.scheduler, server)
        add_CatalogServiceServicer_to_server(self.catalog, server)
        add_TrainerServiceServicer_to_server(self.trainer, server)
        add_InferenceServiceServicer_to_server(self.inference, server)
        self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
        self.scheduler.address = f"127.0.0.1:{self._port}"
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Break every connection."""
        assert self._server is not None
        for server in (self._server, *self._replicas):
            await server.stop(grace=0)

    async def add_replica(self, inference: InferenceDouble, attempt: int = 1) -> grpc.aio.Server:
        """Serve inference at an address of its own, too, which the scheduler names from now on."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_InferenceServiceServicer_to_server(inference, server)
        inference.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._replicas.append(server)
        self.scheduler.replicas[inference.address] = attempt
        return server

    async def connect(self) -> Cluster:
        """A client of these doubles."""
        control = ControlPlane(lambda: self.scheduler.address, "key", patience_s=10)
        return Cluster(self.portal, control, watcher=None)


@contextmanager
def world(inference: InferenceDouble | None = None) -> Iterator[World]:
    """Doubles that serve, with `cluster` connected to them."""
    portal = Portal().start()

    async def begin() -> World:
        made = World(portal, inference or InferenceDouble())
        await made.start()
        made.cluster = await made.connect()
        return made

    made = portal.run(begin())
    # Not cluster.close(): the doubles share its loop and answer until the jobs have ended.
    with made.cluster.active():
        try:
            yield made
        finally:
            portal.run(made.cluster.leave(failed=False))
            portal.run(made.stop())
            portal.close()
