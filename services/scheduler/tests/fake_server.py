"""A server without an engine, for tests of what starts and leases servers: it behaves as it is told.

`python -m fake_server --settings FILE`; the settings have `behavior`:
  normal            ready at once, every assignment too
  exit:N            ends with code N before it registers
  exit_ready:N      ends with code N after it was ready
  silent            never registers
  never_ready       registers, never loads
  failure:TEXT      registers and says that it cannot load
  refuse            answers every assignment with FAILED
  trains:N          says of every job that is assigned to it that it trained on N tokens
It starts a child that sleeps, as a server does with its engine, and writes what it was told to `told.jsonl`.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from opentinker_kit.lifeline import exit_at_eof
from opentinker_kit.logging import configure_logging
from opentinker_kit.metering import TokenMeter
from opentinker_kit.registration import Announcement, Assignment, Registration
from opentinker_kit.settings import ServerSettings
from opentinkerapi.scheduler.v1 import job_pb2


class Handler:
    """Writes down what the scheduler says."""

    def __init__(self, folder: Path, behavior: str, stop: asyncio.Event, meter: TokenMeter) -> None:
        self._path = folder / "told.jsonl"
        self._meter = meter
        self._behavior = behavior
        self._stop = stop

    def _tell(self, **what: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(what) + "\n")

    async def assign(self, assignment: Assignment) -> None:
        self._tell(
            assign=assignment.assignment,
            job=assignment.job,
            attempt=assignment.attempt,
            policies=list(assignment.policies),
        )
        if self._behavior == "refuse":
            raise RuntimeError("the policy cannot be restored")
        if self._behavior.startswith("trains:"):
            self._meter.trained(assignment.job, int(self._behavior.partition(":")[2]))

    async def release(self, assignment: str, job: str) -> None:
        self._tell(release=assignment, job=job)

    def request_drain(self, reason: str) -> None:
        self._tell(drain=reason)
        self._stop.set()

    def load(self) -> job_pb2.ServerLoad:
        return job_pb2.ServerLoad(running_requests=3)


async def serve(values: dict[str, Any]) -> int:
    behavior = values.get("behavior", "normal")
    names = set(ServerSettings.model_fields)
    settings = ServerSettings(**{key: value for key, value in values.items() if key in names})
    configure_logging(settings, "fake")
    folder = settings.state_dir
    if settings.lifeline_fd is not None:
        exit_at_eof(settings.lifeline_fd)
    kind, _, detail = behavior.partition(":")
    if kind == "exit":
        sys.stderr.write("something broke\n")
        return int(detail)
    if kind == "silent":
        await asyncio.sleep(600)
    stop = asyncio.Event()
    trainer = values["server_settings_role"] == "trainer"
    announcement = Announcement(
        role=job_pb2.SLOT_ROLE_TRAINER if trainer else job_pb2.SLOT_ROLE_INFERENCE,
        base_model=values["base_model"],
        base_digest="d" * 64,
        options=job_pb2.ServerOptions(engine=values.get("engine", "noop")),
        slots=values["slots"],
        advertise_address=f"127.0.0.1:{os.getpid() % 50000 + 1}",
        pid=os.getpid(),
        server_id=values["server_id"],
    )
    meter = TokenMeter()
    handler = Handler(folder, behavior, stop, meter)
    registration = Registration(
        settings, announcement, handler, on_lost=stop.set, lost_after_s=10.0, meter=meter
    )
    registration.start()
    if kind == "failure":
        registration.set_failed(detail)
    elif kind != "never_ready":
        registration.set_ready()
    if kind == "exit_ready":
        await asyncio.sleep(0.3)
        sys.stderr.write("it broke later\n")
        os._exit(int(detail))
    await stop.wait()
    await registration.stop()
    return 0


def main() -> int:
    values = json.loads(Path(sys.argv[sys.argv.index("--settings") + 1]).read_text())
    child = subprocess.Popen(["sleep", "600"])
    folder = Path(values["state_dir"])
    (folder / "child.pid").write_text(str(child.pid))
    seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
    (folder / "gpus.json").write_text(json.dumps(seen))
    return asyncio.run(serve(values))


if __name__ == "__main__":
    sys.exit(main())
