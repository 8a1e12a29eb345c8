"""`python -m opentinker_trainer --settings FILE.json`."""

import asyncio
import sys
from collections.abc import Sequence

from opentinker_kit.errors import ServiceError
from opentinker_kit.logging import configure_logging
from opentinker_kit.settings import load_settings
from opentinker_kit.tracing import configure_tracing
from opentinker_trainer.bootstrap import TrainerServer
from opentinker_trainer.settings import TrainerSettings


async def _serve(settings: TrainerSettings) -> int:
    trainer = TrainerServer(settings)
    await trainer.start(install_signals=True)
    try:
        await trainer.run()
    except ServiceError:
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM, SIGINT or the end of the lifeline."""
    settings = load_settings(TrainerSettings, argv)
    configure_logging(settings, "trainer")
    configure_tracing(settings, "trainer")
    return asyncio.run(_serve(settings))


if __name__ == "__main__":
    sys.exit(main())
