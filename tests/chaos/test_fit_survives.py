"""kill -9 of any one process while `fit()` runs: it ends with the weights of a run that nothing disturbed.

Transformers engine, float32, tiny model, hosted multi-turn environment. Each part is killed twice in one run:
in a step before the first checkpoint, and in a step after one.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

import opentinker as ot
from opentinker_local import StackInfo, attach
from opentinker_local.descendants import descendants
from opentinkerapi.scheduler.v1 import job_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

STEPS = 5
CHECKPOINT_EVERY = 3
KILLED_AFTER_STEPS = (1, 3)
"""In step 2 nothing has been saved; in step 4 a checkpoint has."""


class Killer(ot.Callback):
    """Kills what `find` finds, a moment into the step after each of `KILLED_AFTER_STEPS`."""

    def __init__(self, find: Callable[[], list[int]], delay_s: float) -> None:
        self._find = find
        self._delay_s = delay_s
        self._threads: list[threading.Thread] = []
        self.killed: list[int] = []

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step in KILLED_AFTER_STEPS:
            thread = threading.Thread(target=self._kill)
            thread.start()
            self._threads.append(thread)

    def _kill(self) -> None:
        time.sleep(self._delay_s)
        for pid in self._find():
            os.kill(pid, signal.SIGKILL)
            self.killed.append(pid)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def _fit(cluster: ot.Cluster, model: Path, run_dir: Path, callbacks: list[ot.Callback]) -> str:
    """Train, and return the digest of the final weights."""
    result = ot.fit(
        env="guess_number",
        env_options={"low": 0, "high": 4},
        model=str(model),
        tuning=ot.LoRA(rank=4),
        algorithm=ot.GRPO(group_size=4),
        groups_per_step=3,
        steps=STEPS,
        learning_rate=1e-3,
        sampling=ot.SamplingParams(max_tokens=8),
        checkpoint_every=CHECKPOINT_EVERY,
        seed=13,
        run_dir=run_dir,
        callbacks=callbacks,
        trainer=ot.ServerOptions(engine="torch", dtype="float32", context_tokens=1024),
        inference=ot.ServerOptions(engine="transformers", dtype="float32", context_tokens=1024),
        progress=False,
        cluster=cluster,
    )
    assert result.steps == STEPS, "every step must have learned something, or the digest says nothing"
    return result.policy.published.sha256


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stack")


@pytest.fixture(scope="module")
def cluster(state_dir: Path) -> Iterator[ot.Cluster]:
    with ot.connect(state_dir=state_dir) as opened:
        yield opened


@pytest.fixture(scope="module")
def undisturbed(cluster: ot.Cluster, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return _fit(cluster, tiny_model_dir, tmp_path_factory.mktemp("undisturbed"), [])


def _servers(cluster: ot.Cluster, role: int) -> list[int]:
    return [server.pid for server in cluster.servers().result() if server.role == role]


def _env_workers(state_dir: Path) -> list[int]:
    stack: StackInfo = attach(state_dir)
    return [
        process.pid
        for process in psutil.Process(stack.pids["env_host"]).children(recursive=True)
        if "guess_number" in process.cmdline() and any("worker" in argument for argument in process.cmdline())
    ][:1]


@pytest.mark.parametrize("part", ["trainer", "trainer_engine", "inference", "env_worker", "scheduler"])
@pytest.mark.parametrize("delay_s", [0.05])
def test_the_weights_are_those_of_an_undisturbed_run(
    part: str,
    delay_s: float,
    cluster: ot.Cluster,
    state_dir: Path,
    tiny_model_dir: Path,
    undisturbed: str,
    tmp_path: Path,
) -> None:
    find: dict[str, Callable[[], list[int]]] = {
        "trainer": lambda: _servers(cluster, job_pb2.SLOT_ROLE_TRAINER),
        "trainer_engine": lambda: [
            child for pid in _servers(cluster, job_pb2.SLOT_ROLE_TRAINER) for child in descendants(pid)
        ],
        "inference": lambda: _servers(cluster, job_pb2.SLOT_ROLE_INFERENCE),
        "env_worker": lambda: _env_workers(state_dir),
        "scheduler": lambda: [attach(state_dir).pids["scheduler"]],
    }
    killer = Killer(find[part], delay_s)
    digest = _fit(cluster, tiny_model_dir, tmp_path / "run", [killer])
    killer.join()
    assert len(killer.killed) >= len(KILLED_AFTER_STEPS), "nothing was killed"
    assert digest == undisturbed
