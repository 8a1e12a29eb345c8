"""From a fresh clone, `make demo` learns with each of three seeds.

Mean reward and held-out accuracy rise by at least 0.25, in at most 480 s from the first sample to the last
publish, and trainer and sampler differ by at most 0.05 in the mean logprob of a sampled token.
"""

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from scripts.evidence_cases import Progress

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (0, 1, 2)
BOUNDS = {
    "reward_gain": ("at least", 0.25),
    "eval_gain": ("at least", 0.25),
    "seconds": ("at most", 480.0),
    "trainer_sampler_logprob_gap": ("at most", 0.05),
}


def demonstrate(checkout: Path, home: Path, seed: int) -> dict[str, Any]:
    """The demo's own result file, after a run that began with no stack and no cached model of this user's."""
    out = checkout / "runs" / f"demo-{seed}"
    subprocess.run(
        ["make", "demo", f"ARGS=--seed {seed} --out {out}"],
        cwd=checkout,
        env={**os.environ, "XDG_CACHE_HOME": str(home / "cache"), "XDG_DATA_HOME": str(home / "data")},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    result["reward_gain"] = result["reward_last"] - result["reward_first"]
    result["eval_gain"] = result["eval_after"] - result["eval_before"]
    return result


def within(name: str, value: float) -> bool:
    kind, bound = BOUNDS[name]
    return value >= bound if kind == "at least" else value <= bound


def run(progress: Progress) -> dict[str, object]:
    checkout, home = progress.folder / "checkout", progress.folder / "home"
    home.mkdir(exist_ok=True)
    if not checkout.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    seeds = {
        str(seed): progress.part(f"seed-{seed}", partial(demonstrate, checkout, home, seed)) for seed in SEEDS
    }
    return {
        "seeds": seeds,
        "bounds": {name: f"{kind} {bound}" for name, (kind, bound) in BOUNDS.items()},
        "within": all(within(name, result[name]) for result in seeds.values() for name in BOUNDS),
    }
