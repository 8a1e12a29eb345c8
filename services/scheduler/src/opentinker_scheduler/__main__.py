"""`python -m opentinker_scheduler --settings FILE.json`."""

import asyncio
import sys
from collections.abc import Sequence

from opentinker_kit.logging import configure_logging
from opentinker_kit.settings import load_settings
from opentinker_kit.tracing import configure_tracing
from opentinker_scheduler.bootstrap import Scheduler
from opentinker_scheduler.garbage import collect_seldom
from opentinker_scheduler.replica_ports import LeadershipLost
from opentinker_scheduler.settings import SchedulerSettings

EXIT_REPLACED = 75
"""Another scheduler leads. On SQLite starting this one again would only fight it; on PostgreSQL it would
stand by, so whoever supervises replicas should start it again."""


async def _serve(settings: SchedulerSettings) -> int:
    scheduler = Scheduler(settings)
    await scheduler.start(install_signals=True)
    try:
        await scheduler.run()
    except LeadershipLost:
        return EXIT_REPLACED
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM, SIGINT or the end of the lifeline."""
    settings = load_settings(SchedulerSettings, argv)
    configure_logging(settings, "scheduler")
    configure_tracing(settings, "scheduler")
    collect_seldom()
    return asyncio.run(_serve(settings))


if __name__ == "__main__":
    sys.exit(main())
