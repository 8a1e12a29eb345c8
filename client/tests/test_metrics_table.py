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
    "rollout_corr/logprob_abs_diff",
    "rollout_corr/k3",
    "rollout_corr/ratio",
    "rollout_corr/ratio_squared",
    "rows/skipped",
)


def documented() -> list[re.Pattern[str]]:
    patterns = []
    for line in TABLE.read_text().splitlines():
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


def test_the_table_is_complete(doubles: World, tmp_path: Path) -> None:
    doubles.trainer.metrics = dict.fromkeys(OF_THE_TRAINER, (1.0, 2.0))
    result = ot.fit(
        ot.single_turn([{"prompt": "Even?"}], reward=lambda answer, task: float(int(answer) % 2)),
        "tiny",
        steps=3,
        groups_per_step=2,
        evaluation=ot.Evaluation(tasks=2, split="train"),
        run_dir=tmp_path,
    )
    names = {name for row in result.metrics for name in row} | set(result.evaluations[0][1].metrics())
    patterns = documented()
    missing = sorted(name for name in names if not any(pattern.match(name) for pattern in patterns))
    assert not missing
    assert len(patterns) > 60
