"""Connecting: tokenizer cache, embedded stack, errors that say what to do."""

import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from client.tests.doubles.cluster import World

import opentinker as ot
from opentinker import errors
from opentinker.connection import stack, tokenizers
from opentinker.connection.portal import Portal
from opentinker.connection.specs import policy_jobs
from opentinker.sampling import identity
from opentinker.sampling.meter import covered
from opentinkerapi.runtime.errors import CLASSES
from opentinkerapi.runtime.reasons import CATALOGUE, Reason


def test_every_reason_has_a_class_with_a_stdlib_kin() -> None:
    assert {reason for _, reason in CLASSES} == set(CATALOGUE) == set(Reason)
    for kind in CLASSES.values():
        assert issubclass(kind, errors.OpenTinkerError)
        assert getattr(errors, kind.__name__) is kind


def test_the_tokenizer_is_fetched_once_and_checked(doubles: World) -> None:
    policy = doubles.cluster.create_policy("tiny").result()
    tokenizers._built.clear()
    assert policy.tokenizer().result().encode("42") == doubles.inference.tokenizer.encode("42")
    assert doubles.inference.fetched == len(doubles.inference.files)
    kept = sorted(tokenizers.cache_dir().iterdir())
    assert [hashlib.sha256(file.read_bytes()).hexdigest() for file in kept] == [file.name for file in kept]
    kept[0].write_bytes(b"torn")
    tokenizers._built.clear()
    other = doubles.cluster.create_policy("tiny").result()
    other.tokenizer().result()
    assert doubles.inference.fetched == len(doubles.inference.files) + 1


def test_jobs_end_with_their_cluster(doubles: World) -> None:
    from opentinkerapi.scheduler.v1 import job_pb2

    doubles.cluster.create_policy("tiny").result()
    doubles.portal.run(doubles.cluster.leave(failed=False))
    assert [job.state for job in doubles.scheduler.jobs.values()] == [job_pb2.JOB_STATE_SUCCEEDED]


def test_a_job_says_how_urgent_it_is_and_how_long_it_takes(doubles: World) -> None:
    wanted = ot.JobOptions(priority=3, max_duration=timedelta(hours=2), idle_limit=timedelta(minutes=5))
    doubles.cluster.create_policy("tiny", job=wanted).result()
    (asked,) = doubles.scheduler.jobs.values()
    learning, sampling = policy_jobs(
        "tiny", ot.LoRA(), None, None, wanted, name="", run="", serve=False, supervised=False
    )
    assert sampling is not None
    for job in (asked, learning, sampling):
        assert (job.priority, job.max_duration.ToTimedelta()) == (3, timedelta(hours=2))
    assert asked.idle_limit.ToTimedelta() == timedelta(minutes=5)
    # What only samples makes no progress: the scheduler would refuse it.
    assert not sampling.HasField("idle_limit")
    with pytest.raises(errors.InvalidArgument, match="max_duration"):
        ot.JobOptions(max_duration=timedelta())


def test_a_job_that_waits_is_waited_for(doubles: World) -> None:
    said: list[str] = []
    doubles.cluster._watcher = said.append
    doubles.scheduler.starting = 2
    doubles.cluster.create_policy("tiny").result()
    assert (said[0], said[-1]) == ("STARTING: loading the model", "RUNNING")


def test_calls_carry_the_newest_token(doubles: World) -> None:
    """A token lasts as long as the lease that it came with: one that was kept would end a long run."""
    shown: list[str] = []

    async def look(request: Any, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        shown.append(f"{request.job_token} {metadata['x-opentinker-job-token']}")

    doubles.inference.before = look
    policy = doubles.cluster.create_policy("tiny").result()
    policy.sample([1, 2], ot.SamplingParams(max_tokens=2)).result()
    doubles.scheduler.job_token = "newer"
    doubles.portal.run(policy.job._renew())
    policy.sample([1, 2], ot.SamplingParams(max_tokens=2)).result()
    assert shown == ["token token", "newer newer"]


def test_no_cluster_there() -> None:
    from opentinker.connection import opening

    os.environ.pop(opening.ADDRESS_VARIABLE, None)
    patience = opening.FIRST_ANSWER_S
    opening.FIRST_ANSWER_S = 0.5
    try:
        with pytest.raises(errors.Unavailable, match=r"127.0.0.1:1 did not answer"):
            ot.connect("127.0.0.1:1", key="x")
    finally:
        opening.FIRST_ANSWER_S = patience


def test_an_embedded_stack_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "MODULE", "opentinker_nowhere")
    with pytest.raises(errors.MissingDependency, match=r"pip install 'opentinker\[local\]'"):
        ot.connect(state_dir=tmp_path)


FAILS = """
import json, os, sys
root = sys.argv[sys.argv.index("--state-dir") + 1]
line = {"pid": os.getpid(), "state": "failed", "text": "the disk is full"}
open(root + "/progress.jsonl", "w").write(json.dumps(line))
sys.exit(1)
"""


def test_an_embedded_stack_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_to_start.py").write_text(FAILS)
    monkeypatch.setattr(stack, "MODULE", "fails_to_start")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(errors.LaunchFailed, match=r"did not start: the disk is full; see .*supervisor.log"):
        ot.connect(state_dir=tmp_path / "state")


def test_nothing_runs_in_an_empty_directory(tmp_path: Path) -> None:
    assert stack.holder(tmp_path) is None
    assert stack.stop(tmp_path) is False
    (tmp_path / "supervisor.lock").write_text(json.dumps({"pid": os.getpid()}))
    assert stack.holder(tmp_path) is None  # a file that nobody holds


def test_seeds_and_names_are_pure_functions() -> None:
    assert identity.seed(1, "a", 2) == identity.seed(1, "a", 2) != identity.seed(1, "a", "2")
    assert identity.seed(1) < 2**48
    assert identity.request_id("sample", "r", 1) == identity.request_id("sample", "r", 1)
    assert identity.request_id("sample", "r", 1) != identity.request_id("step", "r", 1)
    assert identity.seed(5, "sampling", 3, 0) == 212641448525322


def test_overlapping_engine_work_is_counted_once() -> None:
    assert covered([(0.0, 1.0), (0.5, 2.0), (3.0, 4.0)]) == 3.0


def test_a_portal_refuses_to_wait_for_itself() -> None:
    portal = Portal().start()

    async def inner() -> None:
        async def nothing() -> None:
            pass

        with pytest.raises(RuntimeError, match="await its async form"):
            portal.run(nothing())

    portal.run(inner())
    portal.close()
