"""Log lines are JSON with the ids they belong to, whoever wrote them."""

import json
import logging
import subprocess
import sys

import pytest
import structlog

from opentinker_kit.logging import about, configure

PROGRAM = """
import logging, structlog
from opentinker_kit.logging import configure_logging
from opentinker_kit.settings import ServerSettings
configure_logging(ServerSettings(log_level="warning", instance_id="i1"), service="scheduler")
structlog.contextvars.bind_contextvars(call="c1")
structlog.get_logger().info("hidden")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("shown", size=3)
logging.getLogger("library").warning("from a library")
"""


def test_lines_are_json_with_their_ids() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    ours, theirs = (json.loads(line) for line in done.stderr.splitlines())
    assert (ours["event"], ours["level"], ours["size"], ours["call"]) == ("shown", "error", 3, "c1")
    assert "ZeroDivisionError" in ours["exception"]
    assert (theirs["event"], theirs["logger"]) == ("from a library", "library")
    assert ours["service"] == theirs["service"] == "scheduler"
    assert ours["instance"] == theirs["instance"] == "i1"


def test_an_unknown_level_is_refused() -> None:
    handlers = logging.getLogger().handlers[:]
    with pytest.raises(ValueError, match="LOUD"):
        configure("LOUD")
    assert logging.getLogger().handlers == handlers


def test_lines_are_about_a_job_within() -> None:
    log = structlog.get_logger()
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
        with about("jobs/a"):
            log.info("within")
            log.info("of another", job="jobs/b")
        with about(""):
            log.info("of none")
        log.info("after")
    assert [entry.get("job") for entry in logs] == ["jobs/a", "jobs/b", None, None]
