"""`python -m opentinker_kit.healthcheck HOST:PORT [NAME]`: exits with 0 if the server there says SERVING.

For container health checks; needs no key, as health is open to anyone. Whether that server speaks TLS, and
what it has to be shown, is read from the environment, as the server itself reads it. NAME is the name to
look for in its certificate, where that is not for HOST.
"""

import sys
from dataclasses import replace

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from opentinker_kit.settings import TransportSettings
from opentinkerapi.runtime.channels import tls_credentials, tls_options
from opentinkerapi.runtime.tls import TlsFiles, is_secure, split_address

TIMEOUT_S = 3.0


def is_serving(address: str, tls: TlsFiles | None = None) -> bool:
    """Whether the server at an address says SERVING; by TLS with `tls`."""
    with _channel(address, tls) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def files_of_this_server(name: str = "") -> TlsFiles | None:
    """What the server of this environment has to be shown; None where it speaks no TLS."""
    settings = TransportSettings()
    if settings.tls is None:
        return None
    files = settings.peer_files() or TlsFiles()
    return replace(files, server_name=name or files.server_name)


def _channel(address: str, tls: TlsFiles | None) -> grpc.Channel:
    _, where = split_address(address)
    if not is_secure(address, tls):
        return grpc.insecure_channel(where)
    files = tls or TlsFiles()
    return grpc.secure_channel(where, tls_credentials(files), options=tls_options(files))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m opentinker_kit.healthcheck HOST:PORT [NAME]")
    sys.exit(0 if is_serving(sys.argv[1], files_of_this_server(*sys.argv[2:])) else 1)
