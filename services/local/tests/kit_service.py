"""A real server on the kit, in place of scheduler and env_host: `python -m kit_service --settings FILE`.

The file named by KIT_SERVICE_MODE in the environment can make it misbehave: `fail` ends at start, `stubborn`
ignores SIGTERM, `spawn` starts a child in a session of its own that never ends by itself.
"""

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

from pydantic_settings import SettingsConfigDict

from opentinker_kit.auth import AuthPolicy
from opentinker_kit.logging import configure_logging
from opentinker_kit.server import build_server
from opentinker_kit.settings import ServerSettings, load_settings


class Settings(ServerSettings):
    """Settings of the real services are accepted and left alone."""

    model_config = SettingsConfigDict(env_prefix="OPENTINKER_", extra="ignore")


async def serve(settings: Settings, mode: str) -> None:
    auth = AuthPolicy(settings.bootstrap_key(), settings.service_key(), {})
    server = build_server(settings, lambda _: None, service_names=[], auth=auth)
    await server.start(install_signals=True)
    if mode == "stubborn":
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "spawn":
        sleeper = [sys.executable, "-c", "import time; time.sleep(1000)"]
        await asyncio.to_thread(subprocess.Popen, sleeper, start_new_session=True)
    await server.set_serving(True)
    await server.wait()


def main() -> Any:
    settings = load_settings(Settings)
    configure_logging(settings, settings.instance_id)
    mode = os.environ.get("KIT_SERVICE_MODE", "")
    if mode == "fail":
        sys.exit("the settings make no sense")
    asyncio.run(serve(settings, mode))


if __name__ == "__main__":
    main()
