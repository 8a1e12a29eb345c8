"""Entry: `python -m opentinker_env_host --settings env_host.json`."""

import asyncio

from opentinker_env_host.bootstrap import run
from opentinker_env_host.settings import EnvHostSettings
from opentinker_kit.logging import configure_logging
from opentinker_kit.settings import load_settings
from opentinker_kit.tracing import configure_tracing


def main() -> None:
    """Serve until told to stop."""
    settings = load_settings(EnvHostSettings)
    configure_logging(settings, "env_host")
    configure_tracing(settings, "env_host")
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
