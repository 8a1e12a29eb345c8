"""What the evidence of the use cases shares: demonstrations by scripts, supervised tuning on them,
reinforcement learning from there, held-out rewards before and after.

Demonstrations are of mixed quality, as found ones are: in some a good script plays, in the others a poor one.
So the warmed-up policy knows how a turn looks and seldom what is right; the rest it has to find out.
"""

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import opentinker as ot
from opentinker.environments.agents import tell_legal_actions
from opentinker.environments.tools import in_words
from scripts.evidence_cases import Progress

ROOT = Path(__file__).resolve().parents[1]
PLOTS = ROOT / "docs" / "evidence"
MODEL = "smollm2-135m-instruct"
ENGINE: str | None = None
"""That samples; None: the one that is installed."""
SEEDS = (0, 1, 2)
GAIN = 0.30
"""What the held-out reward must rise by."""
Z95 = 1.96
BATCH = 16

Script = Callable[[ot.Observation, random.Random], str]
Row = dict[str, Any]


@dataclass(frozen=True)
class UseCase:
    """One environment, and how it is learned. `scripts` gives the two of a demonstration, good and poor, made
    anew for each; `good` is the share of the first.
    """

    name: str
    env: type[ot.Environment]
    options: Mapping[str, Any]
    scripts: tuple[Callable[[], Script], Callable[[], Script]]
    good: float
    demonstrations: int
    steps: int
    groups: int
    max_tokens: int
    agents: Mapping[str, Any] = field(default_factory=dict)
    """Who plays the agents that are not trained."""
    limits: ot.Limits | None = None
    warm_rate: float = 4e-4
    rate: float = 2e-4
    samples: int = 2
    """Episodes of each held-out task."""


def demonstration(case: UseCase, script: Script, seed: int) -> Row:
    """An episode of training that the script plays, as chats for `ot.sft`."""
    dice = random.Random(f"demonstration {seed}")
    environment = case.env(**case.options)
    named = len(case.env.agents) > 1
    (learner,) = set(case.env.agents) - set(case.agents)
    messages: list[Row] = []
    try:
        seen: Any = environment.reset(seed=seed, task={})
        pending = dict(seen) if named else {learner: seen}
        while pending:
            ((mover, observation),) = pending.items()
            if mover != learner:
                said = case.agents[mover](observation, dice)
            else:
                shown = tell_legal_actions(observation) if case.env.tell_legal_actions else observation
                messages += [message.to_dict() for message in shown.as_messages()]
                said = script(observation, dice)
                messages.append({"role": "assistant", "content": said})
            action = read(said, case.env)
            step: Any = environment.step({mover: action} if named else action)
            if step.done:
                break
            pending = dict(step.observations) if named else {learner: step.observation}
    finally:
        environment.close()
    if case.env.tools:
        told = in_words([tool.schema for tool in case.env.tools])
        if messages[0]["role"] == "system":
            messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}
        else:
            messages = [{"role": "system", "content": told}, *messages]
    return {"messages": messages}


def read(said: str, env: type[ot.Environment]) -> ot.Action:
    """What a script said as the loop would read it of a model."""
    from opentinker.rollout.tool_calls import parse

    if not env.tools:
        return ot.Action(said)
    heard = parse(said, [tool.name for tool in env.tools])
    return ot.Action(heard.text, heard.tool_calls)


def demonstrations(case: UseCase, seed: int) -> list[Row]:
    """All of a run. Those in which the script never moved are left out."""
    dice = random.Random(f"{case.name} {seed}")
    rows: list[Row] = []
    while len(rows) < case.demonstrations:
        good, poor = case.scripts
        script = (good if dice.random() < case.good else poor)()
        row = demonstration(case, script, dice.randrange(2**31))
        if any(message["role"] == "assistant" for message in row["messages"]):
            rows.append(row)
    return rows


def untrained(case: UseCase, state_dir: Path) -> Row:
    """What the model scores on the held-out tasks as it comes, before anything is learned."""
    with ot.connect(state_dir=fresh(state_dir), progress=True) as cluster:
        inference = ot.ServerOptions(engine=ENGINE)
        policy = cluster.create_policy(MODEL, tuning=ot.LoRA(rank=16), inference=inference).result()
        result = ot.evaluate(
            policy,
            case.env,
            env_options=case.options,
            agents=case.agents,
            sampling=ot.SamplingParams(max_tokens=case.max_tokens),
            limits=case.limits,
        )
    shutil.rmtree(state_dir, ignore_errors=True)
    return {"reward": result.reward, "reward_95": [result.low, result.high], "tasks": result.tasks}


def warm_up(case: UseCase, seed: int, folder: Path, state_dir: Path) -> Row:
    """Supervised tuning on the demonstrations; the checkpoint and the losses at the ends."""
    rows = demonstrations(case, seed)
    with ot.connect(state_dir=fresh(state_dir), progress=True):
        warm = ot.sft(
            rows,
            MODEL,
            tuning=ot.LoRA(rank=16, alpha=32),
            epochs=1,
            batch_size=BATCH,
            learning_rate=case.warm_rate,
            warmup=3,
            decay="linear",
            checkpoint_every=len(rows) // BATCH,
            seed=seed,
            run_dir=fresh(folder / f"warm-{seed}"),
            progress=True,
        )
    assert warm.checkpoint is not None
    return {"checkpoint": warm.checkpoint.name, "loss_first": warm.losses[0], "loss_last": warm.losses[-1]}


def reinforce(case: UseCase, seed: int, folder: Path, state_dir: Path, warm: Row) -> Row:
    """GRPO from the warmed-up checkpoint; held-out rewards before and after."""
    with ot.connect(state_dir=state_dir, progress=True):
        result = ot.fit(
            env=case.env,
            env_options=case.options,
            agents=case.agents,
            model=MODEL,
            tuning=ot.LoRA(rank=16, alpha=32),
            from_checkpoint=warm["checkpoint"],
            algorithm=ot.GRPO(group_size=8),
            groups_per_step=case.groups,
            steps=case.steps,
            learning_rate=ot.schedules.Linear(case.rate, case.steps),
            sampling=ot.SamplingParams(max_tokens=case.max_tokens),
            limits=case.limits,
            evaluation=ot.Evaluation(samples=case.samples),
            seed=seed,
            run_dir=fresh(folder / f"run-{seed}"),
            inference=ot.ServerOptions(engine=ENGINE),
            progress=True,
        )
    PLOTS.mkdir(parents=True, exist_ok=True)
    plot = result.plot(PLOTS / f"{case.name}-seed{seed}.png", f"{case.env.__name__}, seed {seed}")
    before, after = result.evaluations[0][1], result.evaluations[-1][1]
    gain, low, high = gained(rewards_by_task(before), rewards_by_task(after))
    return {
        "held_out_before": before.reward,
        "held_out_after": after.reward,
        "after_95": [after.low, after.high],
        "gain": gain,
        "gain_95": [low, high],
        "tasks": after.tasks,
        "excluded": before.excluded + after.excluded,
        "rewards": [round(reward, 4) for reward in result.rewards],
        "sft_loss_first": warm["loss_first"],
        "sft_loss_last": warm["loss_last"],
        "steps": result.steps,
        "seconds": round(sum(row["timing_s/step"] for row in result.metrics), 1),
        "plot": str(plot.relative_to(ROOT)),
    }


def rewards_by_task(result: ot.EvaluationResult) -> dict[str, float]:
    """The mean reward of each held-out task."""
    return {
        json.dumps(group.task, sort_keys=True): fmean(group.rewards)
        for group in result.groups
        if group.rewards
    }


def gained(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[float, float, float]:
    """The mean gain over the tasks, each compared with itself, and its 95 % interval."""
    gains = [after[task] - before[task] for task in before if task in after]
    half = Z95 * stdev(gains) / len(gains) ** 0.5
    return fmean(gains), fmean(gains) - half, fmean(gains) + half


def fresh(folder: Path) -> Path:
    """A folder name with nothing there, whatever a run that was stopped left."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def measure(case: UseCase, progress: Progress, seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """The model as it comes, then all seeds. One that is stopped goes on after its warm-up, where that is
    done.
    """
    base = progress.part("untrained", partial(untrained, case, progress.folder / "stack-untrained"))
    found = {}
    for seed in seeds:
        state_dir = progress.folder / f"stack-{seed}"
        begin = partial(warm_up, case, seed, progress.folder, state_dir)
        warm = progress.part(f"seed-{seed}-warm", begin)
        go_on = partial(reinforce, case, seed, progress.folder, state_dir, warm)
        found[str(seed)] = progress.part(f"seed-{seed}", go_on)
        shutil.rmtree(state_dir, ignore_errors=True)
    return {"untrained": base, "seeds": found}


def learned(found: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a case whose held-out reward must rise."""
    seeds = found["seeds"].values()
    return {
        **found,
        "bounds": {"gain": f"at least {GAIN}", "gain_95": "above 0"},
        "within": all(each["gain"] >= GAIN and each["gain_95"][0] > 0 for each in seeds),
    }
