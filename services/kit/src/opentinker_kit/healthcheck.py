"""`python -m opentinker_kit.healthcheck HOST:PORT`: exits with 0 if the server there says SERVING.

For container health checks; needs no key, as health is open to anyone.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def is_serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m opentinker_kit.healthcheck HOST:PORT")
    sys.exit(0 if is_serving(sys.argv[1]) else 1)
