"""SFT of SmolLM2-135M-Instruct on 500 short chats lowers the loss on 60 held-out ones.

The chats are those of examples/sft_chats.py; the curve is kept beside this record.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from scripts.evidence_cases import Progress

ROOT = Path(__file__).resolve().parents[2]
PLOTS = ROOT / "docs" / "evidence"
SEEDS = (0,)
LOWER_BY = 0.25
"""At least this share of the loss must be gone."""


def tune(folder: Path, seed: int) -> dict[str, Any]:
    """What the example measures, from its own record of the run."""
    out = folder / f"seed-{seed}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "sft_chats.py"), "--seed", str(seed), "--out", str(out)],
        env={**os.environ, "XDG_DATA_HOME": str(folder / "data")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    held_out = [(row["step"], row["val/loss"]) for row in rows if "val/loss" in row]
    plot = PLOTS / f"sft-seed{seed}.png"
    PLOTS.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(out / "loss.png", plot)
    reply = re.search(r"^(.*\?) (.*)$", done.stdout.splitlines()[-1])
    return {
        "held_out_loss_before": held_out[0][1],
        "held_out_loss_after": held_out[-1][1],
        "held_out_losses": held_out,
        "steps": held_out[-1][0],
        "training_seconds": round(sum(row.get("timing_s/step", 0.0) for row in rows), 1),
        "tokens_a_second": round(
            sum(row.get("perf/total_num_tokens", 0.0) for row in rows)
            / sum(row.get("timing_s/step", 0.0) for row in rows)
        ),
        "asked": reply.group(1) if reply else "",
        "answered": reply.group(2) if reply else "",
        "plot": str(plot.relative_to(ROOT)),
    }


def run(progress: Progress) -> dict[str, object]:
    seeds = {str(seed): progress.part(f"seed-{seed}", partial(tune, progress.folder, seed)) for seed in SEEDS}
    return {
        "seeds": seeds,
        "bound": f"held-out loss lower by at least {LOWER_BY:.0%}",
        "within": all(
            result["held_out_loss_after"] <= (1 - LOWER_BY) * result["held_out_loss_before"]
            for result in seeds.values()
        ),
    }
