"""kill -9 of one of two inference servers while `fit()` runs: the run goes on with the other, and ends with
the weights of a run that nothing disturbed.

Transformers engine, float32, tiny model: a request that is asked again of another server has the same answer.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import opentinker as ot
from opentinker.connection.jobs import Link
from opentinker.sampling.sampler import Sampler
from opentinker_kit.testing import wait_until_sync
from opentinkerapi.scheduler.v1 import job_pb2, scheduler_service_pb2
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

STEPS = 3


class Killer(ot.Callback):
    """Ends one inference server in mid-generation, once, and notes who was there before and after."""

    def __init__(self, servers: Callable[[], list[job_pb2.Server]]) -> None:
        self._servers = servers
        self._thread = threading.Thread(target=self._kill)
        self.before: dict[str, str] = {}
        self.victim = ""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 1:
            self._thread.start()

    def _kill(self) -> None:
        servers = self._servers()
        self.before = {server.name: server.address for server in servers}
        victim = servers[0]
        self.victim = victim.name
        process = psutil.Process(victim.pid)
        quiet = process.children(recursive=True)[0].cpu_times().user

        def generating() -> bool:
            # Its engine computes: requests are on it.
            return bool(process.children(recursive=True)[0].cpu_times().user > quiet + 0.1)

        wait_until_sync(generating, 60, what="the server generates")
        os.kill(victim.pid, signal.SIGKILL)

    def join(self) -> None:
        self._thread.join()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ot.Cluster]:
    with ot.connect(state_dir=tmp_path_factory.mktemp("stack")) as opened:
        yield opened


def _fit(
    cluster: ot.Cluster, model: Path, run_dir: Path, callbacks: list[ot.Callback], replicas: int
) -> ot.FitResult:
    result = ot.fit(
        env="guess_number",
        env_options={"low": 0, "high": 4},
        model=str(model),
        tuning=ot.LoRA(rank=4),
        algorithm=ot.GRPO(group_size=4),
        groups_per_step=4,
        steps=STEPS,
        learning_rate=1e-3,
        sampling=ot.SamplingParams(max_tokens=24),
        seed=17,
        run_dir=run_dir,
        callbacks=callbacks,
        trainer=ot.ServerOptions(engine="torch", dtype="float32", context_tokens=1024),
        inference=ot.ServerOptions(
            engine="transformers", dtype="float32", context_tokens=1024, replicas=replicas
        ),
        progress=False,
        cluster=cluster,
    )
    assert result.steps == STEPS, "every step must have learned something, or the digest says nothing"
    return result


def test_a_killed_replica_does_not_stop_the_run(
    cluster: ot.Cluster, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = _fit(cluster, tiny_model_dir, tmp_path / "undisturbed", [], 1)
    sent = _record(monkeypatch)
    servers = partial(_servers, cluster, "transformers")
    killer = Killer(servers)
    result = _fit(cluster, tiny_model_dir, tmp_path / "run", [killer], 2)
    killer.join()
    assert len(killer.before) == 2, "there were two servers"
    assert result.policy.published.sha256 == undisturbed.policy.published.sha256
    dead = killer.before.pop(killer.victim)
    (other,) = killer.before.values()
    again = _twice(sent, dead)
    assert again, "nothing was on the server when it died"
    assert all(addresses == [dead, other] for addresses in again), "each was sent once more, to the other"
    job = _job(cluster, result.policy.job.name)
    assert (job.state, job.attempt) == (job_pb2.JOB_STATE_RUNNING, 2), "it lost one server and got one"

    assert "replica" not in job.state_reason or "killed by signal 9" in job.state_reason
    whole = partial(_is_whole, cluster, job.name)
    wait_until_sync(whole, 180, what="the dead server has a successor that answers")
    (successor,) = {server.address for server in servers()} - {other}

    def both_are_used() -> bool:
        sent.clear()
        played = ot.run(
            result.policy, env="guess_number", episodes=8, sampling=ot.SamplingParams(max_tokens=4)
        )
        assert (played.episodes, played.excluded) == (8, 0)
        return {address for addresses in sent.values() for address in addresses} == {other, successor}

    wait_until_sync(both_are_used, 60, what="the successor is asked, too")


def test_requests_go_on_while_one_server_after_the_other_is_killed(
    cluster: ot.Cluster, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = _record(monkeypatch)
    servers = partial(_servers, cluster, "noop")
    policy = cluster.create_policy(
        str(tiny_model_dir),
        trainer=ot.ServerOptions(engine="noop", context_tokens=2048),
        inference=ot.ServerOptions(engine="noop", context_tokens=2048, replicas=2),
    ).result()
    with _Flood(policy) as flood:
        for _ in range(2):
            flood.await_more()
            victim, other = sorted(servers(), key=lambda server: server.start_time.ToNanoseconds())
            os.kill(victim.pid, signal.SIGKILL)
            again = partial(_twice, sent, victim.address)
            # gRPC itself tries the dead address for a while, for requests that had not begun.
            wait_until_sync(partial(_any, again), 60, what="what was under way there is sent again")
            flood.await_more()
            assert all(addresses == [victim.address, other.address] for addresses in again())
            whole = partial(_is_whole, cluster, policy.job.name)
            wait_until_sync(whole, 120, what="the dead server has a successor that answers")
            (successor,) = {server.address for server in servers()} - {other.address}
            wait_until_sync(partial(_is_asked, successor, sent), 60, what="the successor is asked, too")
    job = _job(cluster, policy.job.name)
    assert (job.state, job.attempt) == (job_pb2.JOB_STATE_RUNNING, 3)


class _Flood:
    """Keeps requests under way; on leaving, none has failed."""

    CALLERS = 24

    def __init__(self, policy: ot.Policy) -> None:
        self._policy = policy
        self._over = False
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(self.CALLERS)]
        self.answered = 0
        self.failures: list[BaseException] = []

    def _ask(self, number: int) -> None:
        params = ot.SamplingParams(max_tokens=1500, ignore_eos=True)
        try:
            while not self._over:
                completions = self._policy.sample([1 + number, 2], params, n=4, seed=number).result()
                assert [completion.index for completion in completions] == [0, 1, 2, 3]
                self.answered += 1
        except BaseException as error:
            self.failures.append(error)
            raise

    def await_more(self) -> None:
        """Wait until everyone was answered again, more or less."""
        enough = self.answered + 2 * self.CALLERS
        wait_until_sync(lambda: self.answered >= enough or bool(self.failures), 120, what="requests go on")
        assert not self.failures

    def __enter__(self) -> "_Flood":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for thread in self._threads:
            thread.join()
        assert not self.failures


def _record(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Where each request will be sent, by its id."""
    sent: dict[str, list[str]] = {}
    make_request = Sampler._request

    def recording(sampler: Sampler, link: Link, *arguments: Any) -> Any:
        request = make_request(sampler, link, *arguments)
        sent.setdefault(request.request_id, []).append(link.address)
        return request

    monkeypatch.setattr(Sampler, "_request", recording)
    return sent


def _any(found: Callable[[], list[list[str]]]) -> bool:
    return bool(found())


def _is_asked(address: str, sent: dict[str, list[str]]) -> bool:
    return any(address in addresses for addresses in list(sent.values()))


def _twice(sent: dict[str, list[str]], first: str) -> list[list[str]]:
    """Where the requests were sent that were sent more than once, to this address at first."""
    return [addresses for addresses in list(sent.values()) if addresses[0] == first and len(addresses) > 1]


def _servers(cluster: ot.Cluster, engine: str) -> list[job_pb2.Server]:
    """The inference servers of an engine that hold a slot."""
    return [
        server
        for server in cluster.servers().result()
        if server.role == job_pb2.SLOT_ROLE_INFERENCE
        and server.options.engine == engine
        and server.slots_used
    ]


def _is_whole(cluster: ot.Cluster, job: str) -> bool:
    return not _job(cluster, job).state_reason


def _job(cluster: ot.Cluster, name: str) -> job_pb2.Job:
    async def ask() -> job_pb2.Job:
        request = scheduler_service_pb2.GetJobRequest(name=name)
        return (await cluster.control.call(lambda channel: SchedulerServiceStub(channel).GetJob(request))).job

    return cluster.wait(ask())
