"""Entry: `python -m opentinker_gateway --settings gateway.json`."""

import asyncio

from opentinker_gateway.bootstrap import run
from opentinker_gateway.settings import GatewaySettings
from opentinker_kit.logging import configure_logging
from opentinker_kit.settings import load_settings
from opentinker_kit.tracing import configure_tracing


def main() -> None:
    """Serve until told to stop."""
    settings = load_settings(GatewaySettings)
    configure_logging(settings, "gateway")
    configure_tracing(settings, "gateway")
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
