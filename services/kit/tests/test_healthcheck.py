"""The container health check, against a real server."""

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from opentinker_kit.healthcheck import is_serving


def test_it_tells_serving_from_not_serving_and_from_nobody_there() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    state = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        state.set("", health_pb2.HealthCheckResponse.SERVING)
        assert is_serving(f"127.0.0.1:{port}")
        state.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert not is_serving(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()
    assert not is_serving(f"127.0.0.1:{port}")
