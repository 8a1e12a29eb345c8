"""`fit()`: reinforcement learning of a policy in an environment, in one call.

Written with what the package offers everybody (`create_policy`, `rollouts`, `train_samples`, `forward`,
`forward_backward`, `optim_step`, `publish`, `save_checkpoint`, `evaluate`): `loop.train` has the loop.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from opentinker.connection.cluster import Cluster
from opentinker.connection.opening import active_cluster
from opentinker.environments.base import check_class
from opentinker.environments.sources import EnvironmentSpec
from opentinker.loop.algorithms import GRPO, Algorithm, Schedule
from opentinker.loop.loggers import check_callbacks, check_loggers
from opentinker.loop.result import FitResult
from opentinker.loop.settings import LEARNING_RATE, Evaluation, Plan, refuse_later
from opentinker.rollout.limits import Limits
from opentinker.rollout.stragglers import Stragglers, WaitAll
from opentinker.sampling.params import SamplingParams
from opentinker.training.results import Checkpoint
from opentinker.training.tuning import AdamW, JobOptions, LoRA, ServerOptions, Tuning

CLIP_NORM = 1.0


def fit(
    env: EnvironmentSpec,
    model: str,
    *,
    tuning: Tuning | None = None,
    from_checkpoint: Checkpoint | str = "",
    algorithm: Algorithm | None = None,
    groups_per_step: int = 8,
    steps: int = 40,
    learning_rate: Schedule = LEARNING_RATE,
    optimizer: AdamW | None = None,
    sampling: SamplingParams | None = None,
    limits: Limits | None = None,
    evaluation: Evaluation | None = None,
    checkpoint_every: int | None = None,
    seed: int = 0,
    env_options: Mapping[str, Any] | None = None,
    agents: Mapping[str, Any] | None = None,
    renderer: str = "",
    stragglers: Stragglers | None = None,
    split: str = "train",
    shuffle: bool = True,
    name: str = "",
    run_dir: str | Path | None = None,
    loggers: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    trainer: ServerOptions | None = None,
    inference: ServerOptions | None = None,
    job: JobOptions | None = None,
    stop_after_constant: int = 10,
    stop_after_skipped: int = 5,
    logprob_check: float | bool = True,
    progress: bool | None = None,
    cluster: Cluster | None = None,
    **later: Any,
) -> FitResult:
    """Train a policy over `model` in `env` and block until it is done.

    Each step plays `groups_per_step` groups of `algorithm.group_size` episodes of one task, takes one
    optimizer step on them (more where the algorithm has epochs or mini-batches) and publishes the weights.
    `tuning` says what is trained: LoRA(...) (default) or Full(...); `from_checkpoint` gives it the weights of
    a checkpoint of the same tuning to start from (of `sft()`, say). `learning_rate` is a number or a function
    of the step (1, 2, 3 ...); the rest of the optimizer is `optimizer` (default: gradient norm clipped at 1).
    The loss is divided by the loss tokens of the whole batch, rows that cannot contribute included, unless
    the algorithm aggregates in another way. `env` is an environment class, played in this process, or the
    name of a hosted one. `job` has the job's priority and limits. Without a `cluster` the innermost open one
    is used, or an embedded stack is started.

    `agents` says who plays the agents that the environment names: names of policies, each of which is
    trained on what it plays ({"white": "attacker", "black": "defender"}; one name twice is self-play), or
    opponents that are not: `ot.Frozen("attacker", version=0)`, `ot.OpponentPool()`, or a function of the
    observation and a `random.Random`. An agent that is not named is played by the first policy; without
    `agents` one plays all.

    `renderer` names the format of conversations: "chatml", "llama3", "role-colon", or "chat-template", the
    model's own (default; plain text where it has none). It is kept beside the checkpoints, and the policy
    goes on speaking it.

    `stragglers`: what a step does about groups that take long: `ot.WaitAll()` (default), or `ot.MinViable()`,
    which goes on without them and takes them into a later step.

    Before its first update the run compares trainer and sampler on tokens of its own first batch and refuses
    to train with LogprobMismatch where their mean logprobs differ by more than 1e-3 (both float32), otherwise
    0.08. `logprob_check` is another bound, or False.

    A batch in which no group's rewards differ takes no step; after `stop_after_constant` of them in a row
    the run stops (`FitResult.stopped` says so). TrainingStopped after `stop_after_skipped` steps in a row
    whose gradient was not finite, naming the last good checkpoint. Options of later versions are refused by
    name with UnsupportedOption.
    """
    plan = _plan(locals())
    chosen = cluster if cluster is not None else active_cluster()
    return chosen.portal.run(_train(plan, chosen))


async def fit_async(
    env: EnvironmentSpec, model: str, *, cluster: Cluster | None = None, **options: Any
) -> FitResult:
    """`fit()` for coroutines of any event loop; takes the same options."""
    plan = _plan({**_DEFAULTS, "env": env, "model": model, **_known(options), "later": _unknown(options)})
    chosen = cluster if cluster is not None else await asyncio.to_thread(active_cluster)
    return await chosen.portal.bridge(_train(plan, chosen))


def _train(plan: Plan, cluster: Cluster) -> Coroutine[Any, Any, FitResult]:
    # Loaded when a run begins: who imports the package does not wait for it.
    from opentinker.loop.train import train

    return train(plan, cluster)


_DEFAULTS: dict[str, Any] = {
    key: value for key, value in (fit.__kwdefaults__ or {}).items() if key != "cluster"
}


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in _DEFAULTS}


def _unknown(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _DEFAULTS}


def _plan(given: Mapping[str, Any]) -> Plan:
    """Check everything that can be checked before anything is started."""
    refuse_later(given["later"])
    if not isinstance(given["env"], str):
        check_class(given["env"])
    check_loggers(given["loggers"])
    check_callbacks(given["callbacks"])
    options = {name: value for name, value in given.items() if name not in ("later", "cluster")}
    defaults = {
        "tuning": LoRA(),
        "algorithm": GRPO(),
        "optimizer": AdamW(clip_norm=CLIP_NORM),
        "sampling": SamplingParams(),
        "limits": Limits(),
        "env_options": {},
        "agents": {},
        "stragglers": WaitAll(),
    }
    options |= {name: value for name, value in defaults.items() if options[name] is None}
    start = options["from_checkpoint"]
    options["from_checkpoint"] = start.name if isinstance(start, Checkpoint) else start
    options["run_dir"] = Path(options["run_dir"]) if options["run_dir"] is not None else None
    return Plan(**options)
