"""TRL's side of the `trl` case: GRPOTrainer on recorded rollouts, and what is recorded.

Completions come from `rollout_func`, TRL's own hook for rollouts made elsewhere. The seconds of a step are
from its begin to its end without `_prepare_inputs`, in which TRL takes the rollouts in and scores them:
what remains is forward, backward and the optimizer. `python -m benchmarks.train_trl …` takes a step for
each line of its input.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.train_rows import TrainRow, read_rows

RECORDED = Path(__file__).parent / "data" / "completions.json"
GROUP = 8
MICRO_BATCH_ROWS = 8
ROOT = Path(__file__).resolve().parent.parent


def ensure_trl() -> None:
    """Install the `bench` dependencies of this repository if TRL is not there."""
    if importlib.util.find_spec("trl") is None:
        constraints = ROOT / "deploy" / "constraints" / "dev.txt"
        command = [sys.executable, "-m", "pip", "install", "--constraint", str(constraints)]
        subprocess.run(
            [*command, "--group", f"{ROOT / 'pyproject.toml'}:bench"], check=True, stdout=sys.stderr
        )


def recorded_rows() -> list[TrainRow]:
    """Groups of recorded completions, their logprobs, and advantages (r - mean) / std of recorded rewards."""
    rows = []
    for group in json.loads(RECORDED.read_text())["groups"]:
        prompt, rewards = group["prompt_ids"], group["rewards"]
        mean = sum(rewards) / len(rewards)
        spread = (sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
        for ids, logprobs, reward in zip(group["completion_ids"], group["logprobs"], rewards, strict=True):
            rows.append(
                TrainRow(
                    prompt + ids,
                    [0] * len(prompt) + [1] * len(ids),
                    [0.0] * len(prompt) + logprobs,
                    (reward - mean) / (spread + 1e-6),
                )
            )
    return rows


class TrlTrainer:
    """A GRPOTrainer that is fed, and measured from inside."""

    def __init__(
        self, model_dir: Path, rows: Sequence[TrainRow], *, dtype: str, threads: int, work_dir: str
    ) -> None:
        import datasets
        import torch
        from peft import LoraConfig
        from transformers import AutoTokenizer, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        from benchmarks.train_plain import TARGETS

        torch.set_num_threads(threads)
        self._rows = rows
        self._begin = self._inputs_s = 0.0
        outer = self

        class Fed(GRPOTrainer):  # type: ignore[misc]
            def _prepare_inputs(self, generation_batch: Any) -> Any:
                begin = time.perf_counter()
                inputs = super()._prepare_inputs(generation_batch)
                outer._inputs_s += time.perf_counter() - begin
                return inputs

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                outer._wait_for_a_line()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                seconds = time.perf_counter() - outer._begin - outer._inputs_s
                print(json.dumps({"seconds": seconds}), flush=True)

        config = GRPOConfig(
            output_dir=work_dir,
            per_device_train_batch_size=MICRO_BATCH_ROWS,
            gradient_accumulation_steps=len(rows) // MICRO_BATCH_ROWS,
            num_generations=GROUP,
            max_steps=100_000,
            learning_rate=1e-5,
            max_grad_norm=1.0,
            beta=0.0,
            bf16=False,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            model_init_kwargs={"dtype": dtype},
            max_completion_length=max(row.loss_tokens for row in rows),
        )
        self._trainer = Fed(
            model=str(model_dir),
            args=config,
            reward_funcs=self._rewards,
            train_dataset=datasets.Dataset.from_dict(
                {"prompt": [str(n) for n in range(len(rows) // GROUP)] * 64}
            ),
            processing_class=AutoTokenizer.from_pretrained(model_dir),
            peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS),
            rollout_func=self._rollouts,
            callbacks=[Clock()],
        )

    def _rollouts(self, prompts: Sequence[Any], _trainer: Any) -> Mapping[str, list[Any]]:
        """The recorded rollouts: TRL asks for each group's prompt as often as the group has members."""
        assert len(prompts) == len(self._rows)
        found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for row in self._rows:
            prompt = len(row.token_ids) - row.loss_tokens
            found["prompt_ids"].append(row.token_ids[:prompt])
            found["completion_ids"].append(row.token_ids[prompt:])
            found["logprobs"].append((row.logprobs or [])[prompt:])
        return found

    def _rewards(self, prompts: Sequence[Any], **_: Any) -> list[float]:
        return [row.advantage for row in self._rows[: len(prompts)]]

    def _wait_for_a_line(self) -> None:
        if not sys.stdin.readline():
            sys.stdout.flush()
            os._exit(0)
        self._begin, self._inputs_s = time.perf_counter(), 0.0

    def run(self) -> None:
        """Steps for as long as lines come."""
        print(json.dumps({"ready": True}), flush=True)
        self._trainer.train()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    rows = read_rows(arguments.rows)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    with tempfile.TemporaryDirectory(prefix="ot-trl-") as work_dir:
        TrlTrainer(
            arguments.model_dir, rows, dtype=arguments.dtype, threads=arguments.threads, work_dir=work_dir
        ).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
