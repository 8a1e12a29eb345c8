"""Logs: one JSON object a line on standard error, with the ids of the call that a line belongs to.

A line with `job` is shown to who owns that job, and no other line of a server is. So it names a job only
where everything in it is that job's; what is shared, an engine that died, names none.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import structlog

from opentinker_kit.settings import ServerSettings


def configure_logging(settings: ServerSettings, service: str = "") -> None:
    """Log as a server's settings say; every line names the service and its instance."""
    configure(settings.log_level, as_json=settings.log_json, service=service, instance=settings.instance_id)


def configure(level: str = "INFO", *, as_json: bool = True, **names: str) -> None:
    """Send structlog's and the standard library's records to standard error, as JSON or for people to read.

    `names` are bound to every line. ValueError if there is no such level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r} is none of {sorted(logging.getLevelNamesMapping())}")
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if as_json:
        final: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        final = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler], force=True)
    structlog.contextvars.bind_contextvars(**{key: value for key, value in names.items() if value})


@contextmanager
def about(job: str) -> Iterator[None]:
    """Lines that are logged within are about a job, `jobs/{job}`; with an empty name about none.

    Tasks that are started within stay about it: only for work that is the job's own.
    """
    with structlog.contextvars.bound_contextvars(job=job) if job else nullcontext():
        yield
