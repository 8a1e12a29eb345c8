"""Every metric that `fit()` writes is in the table, and the table names none that does not exist."""

import re
from pathlib import Path

from client.tests.doubles.cluster import World

import opentinker as ot

TABLE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
OF_THE_TRAINER = (
    "actor/ppo_kl",
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/entropy",
    "actor/kl_loss",
    "actor/distillation_loss",
    "critic/vf_loss",
    "critic/vf_clipfrac",
    "critic/vpred_mean",
    "critic/returns_mean",
    "rollout_corr/logprob_abs_diff",
    "rollout_corr/kl",
    "rollout_corr/k3",
    "rollout_corr/chi2",
    "rollout_corr/ratio",
    "rollout_corr/ratio_squared",
    "rollout_corr/clip_fraction",
    "rollout_corr/weight",
    "rows/skipped",
)


def documented() -> list[re.Pattern[str]]:
    patterns = []
    # What other kinds of runs emit stands under headings of its own.
    for line in TABLE.read_text().split("\n## ")[0].splitlines():
        if not line.startswith("| `"):
            continue
        base = ""
        for name in re.findall(r"`([^`]+)`", line.split("|")[1]):
            if name.startswith("/"):
                name = base.rsplit("/", 1)[0] + name
            elif name.startswith("_"):
                name = "timing_s/engine" + name
            base = name
            text = re.escape(name).replace(r"/\*", "/(mean|max|min)")
            text = re.sub("REASON|COMPONENT|NAME|ENV", "[A-Za-z0-9_]+", text).replace("@N", r"@\d+")
            patterns.append(re.compile(f"{text}$"))
    patterns.append(re.compile(r"val-core/\w+/reward/(low95|high95)@\d+$"))
    return patterns


EVEN = ot.single_turn([{"prompt": "Even?"}], reward=lambda answer, task: float(int(answer) % 2), name="even")
ALGORITHMS = (
    ot.GRPO(),
    ot.GRPO(
        kl=ot.KLPenalty(coefficient=ot.AdaptiveKL(0.1, 1.0)),
        entropy_coefficient=0.01,
        off_policy_correction=ot.TIS(),
        epochs=2,
        mini_batches=2,
        overlong=ot.Overlong(2, max_tokens=3),
    ),
    ot.GRPO(kl=ot.KLPenalty("reward")),
    ot.ActorCritic(critic=ot.Critic(shared=True), group_size=4),
    ot.ActorCritic(critic=ot.Critic(warmup=1), group_size=4),
)


def test_the_table_is_complete(doubles: World, tmp_path: Path) -> None:
    """Both ways: what is emitted is listed, and of what is listed every name is emitted by some algorithm."""
    doubles.trainer.metrics = dict.fromkeys(OF_THE_TRAINER, (1.0, 2.0))
    names: set[str] = set()
    for algorithm in ALGORITHMS:
        result = ot.fit(
            EVEN,
            "tiny",
            algorithm=algorithm,
            steps=2,
            groups_per_step=2,
            evaluation=ot.Evaluation(tasks=2, split="train"),
            run_dir=tmp_path,
        )
        names |= {name for row in result.metrics for name in row}
        names |= set(result.evaluations[0][1].metrics())
    patterns = documented()
    missing = sorted(name for name in names if not any(pattern.match(name) for pattern in patterns))
    assert not missing
    unseen = {pattern.pattern for pattern in patterns if not any(pattern.match(name) for name in names)}
    assert unseen <= {
        # Of episodes that fail, and of environments that report numbers.
        "rollout/excluded/[A-Za-z0-9_]+$",
        *(f"env/[A-Za-z0-9_]+/{kind}$" for kind in ("mean", "sum", "max", "min")),
        "reward/[A-Za-z0-9_]+/mean$",
        # Of environments that name their agents.
        *(f"agents/[A-Za-z0-9_]+/score/{kind}$" for kind in ("mean", "max", "min")),
    }
