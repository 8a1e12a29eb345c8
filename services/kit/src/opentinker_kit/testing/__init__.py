"""Help for tests: real servers on free ports, a tiny model, waiting. Not imported by services.

pytest_plugins = ["opentinker_kit.testing.plugin"]
"""

from opentinker_kit.processes import free_port
from opentinker_kit.testing.models import build_tiny_qwen3
from opentinker_kit.testing.postgres import PostgresServer, start_postgres
from opentinker_kit.testing.servers import (
    NatsServer,
    S3Server,
    start_nats,
    start_weed,
)
from opentinker_kit.testing.vision import build_tiny_qwen2_5_vl
from opentinker_kit.testing.waiting import wait_until, wait_until_sync

__all__ = [
    "NatsServer",
    "PostgresServer",
    "S3Server",
    "build_tiny_qwen2_5_vl",
    "build_tiny_qwen3",
    "free_port",
    "start_nats",
    "start_postgres",
    "start_weed",
    "wait_until",
    "wait_until_sync",
]
