"""Measures an environment instead of believing it: does it repeat itself, heed its seed, give valid rewards?

    report = await probe(MyGame)             # or "module:Class", or on a command line:
    python -m opentinker.environments.probe module:Class

Episodes are played with the same seed twice, interleaved with another one, and in a second process, and their
answers compared by digest, as a host compares those of an episode that it plays again. This needs neither
grpc nor numpy: env_host runs it as a program, where the environment's packages are.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from opentinker.environments import worker
from opentinker.environments.base import EnvironmentClass, EnvironmentInfo, check_options, describe, make
from opentinker.environments.content import plain_json
from opentinker.environments.traces import DEFAULT_ACTIONS, Episode, Play, Trace, first_difference

SEEDS, STEPS = 4, 8
MAX_SEEDS, MAX_STEPS = 64, 1000
STEP_TIMEOUT_S = 30.0
PASSED, FAILED, SKIPPED = "PASSED", "FAILED", "SKIPPED"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    verdict: str
    """PASSED, FAILED or SKIPPED."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long calls of one kind took."""

    call: str
    count: int
    median_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a probe found."""

    environment: str
    deterministic: bool
    """What the environment says of itself."""
    checks: tuple[Check, ...]
    warnings: tuple[str, ...]
    """What its author should know; empty where nothing is wrong."""
    timings: tuple[Timing, ...]
    episodes: int
    steps: int

    def check(self, name: str) -> Check:
        """The check of this name."""
        return next(check for check in self.checks if check.name == name)


@dataclass(slots=True)
class _Plan:
    cls: EnvironmentClass
    info: EnvironmentInfo
    target: str
    path: Sequence[str]
    options: Mapping[str, Any]
    seeds: Sequence[int]
    steps: int
    play: Play
    played: list[Trace] = field(default_factory=list)


async def probe(
    env: EnvironmentClass | str,
    options: Mapping[str, Any] | None = None,
    *,
    seeds: int = SEEDS,
    steps: int = STEPS,
    actions: Iterable[str] = (),
    path: Sequence[str] = (),
    step_timeout_s: float = STEP_TIMEOUT_S,
    import_s: float | None = None,
) -> ProbeReport:
    """Play it and report. ValueError for what cannot be asked; what the environment does wrong is in the
    report.
    """
    for name, value, most in (("seeds", seeds, MAX_SEEDS), ("steps", steps, MAX_STEPS)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} must be from 1 to {most}, not {value}")
    began = time.perf_counter()
    cls = worker.load(env, list(path)) if isinstance(env, str) else env
    if isinstance(env, str) and import_s is None:
        import_s = time.perf_counter() - began
    info = describe(cls)
    check_options(cls, options or {})
    target = env if isinstance(env, str) else _target_of(cls)
    task: Mapping[str, Any] = {}
    if info.splits:
        found = make(cls, options or {}).tasks(info.splits[0])
        task = plain_json(found[0], "task") if found else {}
    play = Play(task, tuple(actions) or DEFAULT_ACTIONS, steps, step_timeout_s)
    plan = _Plan(cls, info, target, path, options or {}, range(1, seeds + 1), steps, play)
    checks = await _checks(plan)
    timings = [Timing("import", 1, import_s, import_s)] if import_s is not None else []
    timings += _timings("reset", [trace.reset_s for trace in plan.played])
    timings += _timings("step", [time_s for trace in plan.played for time_s in trace.step_s])
    return ProbeReport(
        info.name,
        info.deterministic,
        tuple(checks),
        tuple(_warnings(info, checks)),
        tuple(timings),
        len(plan.played),
        sum(len(trace.step_s) for trace in plan.played),
    )


async def _checks(plan: _Plan) -> list[Check]:
    once = [await _played(plan, seed) for seed in plan.seeds]
    again = [await _played(plan, seed) for seed in plan.seeds]
    checks = [_compared("repeats", plan, once, again)]
    mixed = await _interleaved(plan)
    checks.append(_compared("interleaved", plan, once[: len(mixed)], mixed))
    checks.append(await _in_two_processes(plan, once))
    checks.append(_seed_matters(plan, once, repeats=checks[0].verdict == PASSED))
    alone = all(check.verdict == PASSED for check in checks[:2])
    checks.append(await _snapshots(plan, once[0], alone=alone))
    errors = [trace.error for trace in (*once, *again) if trace.error]
    wrong = [error for error in errors if "InvalidReward" in error]
    broken = [error for error in errors if "InvalidReward" not in error]
    checks.append(_rewards(once, wrong))
    checks.append(Check("crashes", FAILED, broken[0]) if broken else Check("crashes", PASSED))
    return checks


async def _played(plan: _Plan, seed: int) -> Trace:
    episode = Episode(plan.cls, plan.options, seed, plan.play)
    while await episode.move():
        pass
    trace = await episode.end()
    plan.played.append(trace)
    return trace


async def _interleaved(plan: _Plan) -> list[Trace]:
    """Episodes of the first two seeds, move by move in turn; of one seed where there is no other."""
    seeds = [*plan.seeds[:2]] if len(plan.seeds) > 1 else [plan.seeds[0], plan.seeds[0] + 1]
    episodes = [Episode(plan.cls, plan.options, seed, plan.play) for seed in seeds]
    going = list(episodes)
    while going:
        going = [episode for episode in going if await episode.move()]
    traces = [await episode.end() for episode in episodes]
    plan.played += traces
    return traces[: len(plan.seeds)]


async def _snapshots(plan: _Plan, whole: Trace, *, alone: bool) -> Check:
    """Whether an episode that is forked after its first step, and its fork, go on as one that was not."""
    name = "snapshots"
    if not alone:
        return Check(name, SKIPPED, "there is nothing to compare with: episodes do not repeat themselves")
    if plan.info.snapshots not in ("NATIVE", "COPY"):
        return Check(name, SKIPPED, f"its episodes are forked by {plan.info.snapshots}")
    episode = Episode(plan.cls, plan.options, plan.seeds[0], plan.play)
    going = await episode.move() and await episode.move()
    if not going or episode.trace.ended:
        await episode.end()
        return Check(name, SKIPPED, "the episode was over after its first step")
    try:
        fork = await episode.fork()
    except Exception as error:
        await episode.end()
        kind = plan.info.snapshots
        if kind == "COPY":
            return Check(name, SKIPPED, f"it cannot be copied: {type(error).__name__}: {error}")
        return Check(name, FAILED, f"{kind}: {error}")
    for each in (fork, episode):
        while await each.move():
            pass
    traces = [await fork.end(), await episode.end()]
    plan.played += traces
    for trace, what in zip(traces, ("a fork", "an episode that was forked"), strict=True):
        if difference := first_difference(whole, trace):
            return Check(name, FAILED, f"{plan.info.snapshots}: of {what}, {difference}")
    return Check(name, PASSED, plan.info.snapshots)


async def _in_two_processes(plan: _Plan, once: Sequence[Trace]) -> Check:
    name = "two_processes"
    if not plan.target:
        return Check(name, SKIPPED, "the class cannot be imported by its name in another process")
    request = {
        "options": dict(plan.options),
        "task": dict(plan.play.task),
        "actions": list(plan.play.actions),
        "seeds": [plan.seeds[0]],
        "steps": plan.steps,
        "timeout_s": plan.play.timeout_s,
    }
    words = [sys.executable, "-P", "-m", "opentinker.environments.probe", plan.target, "--traces"]
    for folder in plan.path or [entry for entry in sys.path if entry]:
        words += ["--path", folder]
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        patience = 60.0 + plan.play.timeout_s * (plan.steps + 2)
        said, trouble = await asyncio.wait_for(process.communicate(json.dumps(request).encode()), patience)
    except TimeoutError:
        return Check(name, FAILED, "the second process did not end")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        last = trouble.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        return Check(name, SKIPPED, f"the second process could not play it: {last[0][-300:]}")
    other = [Trace(**value) for value in json.loads(said)]
    return _compared(name, plan, once[:1], other)


def _compared(name: str, plan: _Plan, first: Sequence[Trace], second: Sequence[Trace]) -> Check:
    for seed, one, other in zip(plan.seeds, first, second, strict=False):
        if difference := first_difference(one, other):
            return Check(name, FAILED, f"with seed {seed} {difference}")
    return Check(name, PASSED)


def _seed_matters(plan: _Plan, once: Sequence[Trace], *, repeats: bool) -> Check:
    name = "seed_matters"
    if not repeats:
        return Check(name, SKIPPED, "the same seed gives different episodes")
    if len(once) < 2:
        return Check(name, SKIPPED, "one seed only was played")
    if any(trace.digests != once[0].digests for trace in once[1:]):
        return Check(name, PASSED)
    if plan.info.splits:
        return Check(name, SKIPPED, "every seed gives the same episode of a task, and tasks come from a list")
    return Check(name, FAILED, f"with the same actions seeds 1 to {len(once)} give the same episode")


def _rewards(once: Sequence[Trace], wrong: Sequence[str]) -> Check:
    if wrong:
        return Check("rewards", FAILED, wrong[0])
    over = [trace for trace in once if trace.ended and not trace.error]
    if not over:
        return Check("rewards", SKIPPED, "no episode ended within the steps that were played")
    if all(trace.status == "UNSCORED" for trace in over):
        return Check("rewards", FAILED, "no episode that ended has a reward")
    return Check("rewards", PASSED)


def _warnings(info: EnvironmentInfo, checks: Sequence[Check]) -> list[str]:
    words = {
        "repeats": "IT DROPS ITS SEED: the same seed and actions give another episode",
        "interleaved": "episodes in one process disturb each other: host it as exclusive",
        "two_processes": "another process gives another episode for the same seed and actions",
        "seed_matters": "IT SEEMS TO IGNORE ITS SEED: no difference between seeds was seen",
        "snapshots": "its snapshots do not hold the whole episode: fix them, or set copyable = False",
        "rewards": "its rewards are not valid",
        "crashes": "it raises",
    }
    found: list[str] = []
    repeats = checks[0].verdict != FAILED
    for check in checks:
        if check.verdict != FAILED:
            continue
        if check.name in ("repeats", "interleaved", "two_processes", "snapshots") and not info.deterministic:
            continue  # it says so itself
        if check.name in ("interleaved", "two_processes", "snapshots") and not repeats:
            continue  # it follows
        found.append(f"{words[check.name]} ({check.detail})")
    return found


def _timings(call: str, times: Sequence[float]) -> list[Timing]:
    return [Timing(call, len(times), statistics.median(times), max(times))] if times else []


def _target_of(cls: EnvironmentClass) -> str:
    """By which another process finds the class; empty if it cannot."""
    module = sys.modules.get(cls.__module__)
    if cls.__module__ == "__main__" or "<" in cls.__qualname__ or not getattr(module, "__file__", None):
        return ""
    return f"{cls.__module__}:{cls.__qualname__}"


async def traces_of(target: str, path: Sequence[str], request: Mapping[str, Any]) -> list[Trace]:
    """What a probe in another process compares with."""
    cls = worker.load(target, list(path))
    play = Play(request["task"], tuple(request["actions"]), request["steps"], request["timeout_s"])
    plan = _Plan(cls, describe(cls), target, path, request["options"], request["seeds"], play.steps, play)
    return [await _played(plan, seed) for seed in request["seeds"]]


def main(argv: Sequence[str] | None = None) -> int:
    """Probe and print the report as one JSON line; with --traces those that standard input asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", help="module:Class")
    parser.add_argument("--name", default="", help="not used; as a worker's")
    parser.add_argument("--path", action="append", default=[], help="folder to find the module in")
    parser.add_argument("--request", default="{}", help="options, seeds, steps, actions as a JSON object")
    parser.add_argument("--traces", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, default=0, help="process id of the host")
    arguments = parser.parse_args(argv)
    source, sink = worker.take_standard_streams()
    worker.die_with(arguments.parent)
    answer: Any
    try:
        if arguments.traces:
            request = json.loads(source.read())
            answer = [
                asdict(trace) for trace in asyncio.run(traces_of(arguments.target, arguments.path, request))
            ]
        else:
            asked = json.loads(arguments.request)
            answer = asdict(asyncio.run(probe(arguments.target, path=arguments.path, **asked)))
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        if arguments.traces:
            return 1
        answer = {"error": f"{type(error).__name__}: {error}"}
    sink.write(json.dumps(answer).encode() + b"\n")
    sys.stderr.flush()
    os._exit(0)  # whatever threads the environment left


if __name__ == "__main__":
    sys.exit(main())
