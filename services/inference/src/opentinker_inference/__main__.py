"""`python -m opentinker_inference --settings FILE.json`: serve until told to stop."""

import asyncio
import sys

import structlog

from opentinker_inference.bootstrap import InferenceServer
from opentinker_inference.settings import InferenceSettings
from opentinker_kit.errors import ServiceError
from opentinker_kit.logging import configure_logging
from opentinker_kit.settings import load_settings
from opentinker_kit.tracing import configure_tracing


def main() -> None:
    settings = load_settings(InferenceSettings)
    configure_logging(settings, "inference")
    configure_tracing(settings, "inference")
    try:
        status = asyncio.run(_serve(settings))
    except (ServiceError, OSError) as error:
        text = error.message if isinstance(error, ServiceError) else str(error)
        structlog.get_logger().error("cannot serve", error=text)
        status = 1
    sys.exit(status)


async def _serve(settings: InferenceSettings) -> int:
    return await InferenceServer(settings).run()


if __name__ == "__main__":
    main()
