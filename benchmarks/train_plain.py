"""The baseline of the training benchmarks: a loop over transformers and torch's AdamW, as one would write it.

Micro-batches in arrival order, padded to their longest row, the model's own loss over the masked tokens of
the whole batch. `python -m benchmarks.train_plain …` loads once, says so, and takes a step for each line of
its input; it answers each with the seconds that the step took.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.train_rows import TrainRow, read_rows

IGNORED = -100
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class PlainTrainer:
    """A model, its optimizer and nothing else."""

    def __init__(self, model_dir: Path, *, dtype: str, tuning: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self._torch = torch
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
        if tuning == "lora":
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS)
            model = get_peft_model(model, config)
        self._model = model
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=1e-5, weight_decay=0.0)

    def step(self, rows: Sequence[TrainRow], micro_batch_rows: int) -> float:
        """One optimizer step over the rows; its seconds."""
        torch = self._torch
        begin = time.perf_counter()
        total = sum(row.loss_tokens for row in rows)
        for start in range(0, len(rows), micro_batch_rows):
            batch = rows[start : start + micro_batch_rows]
            length = max(len(row.token_ids) for row in batch)
            ids = torch.zeros(len(batch), length, dtype=torch.long)
            attention = torch.zeros(len(batch), length, dtype=torch.long)
            labels = torch.full((len(batch), length), IGNORED)
            for index, row in enumerate(batch):
                own = len(row.token_ids)
                ids[index, :own] = torch.tensor(row.token_ids)
                attention[index, :own] = 1
                labels[index, :own] = torch.where(
                    torch.tensor(row.loss_mask, dtype=torch.bool), ids[index, :own], IGNORED
                )
            output = self._model(
                input_ids=ids,
                attention_mask=attention,
                labels=labels,
                num_items_in_batch=total,
                use_cache=False,
            )
            output.loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tuning", choices=("lora", "full"), default="lora")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--micro-batch-rows", type=int, default=8)
    arguments = parser.parse_args()
    rows = read_rows(arguments.rows)
    trainer = PlainTrainer(
        arguments.model_dir, dtype=arguments.dtype, tuning=arguments.tuning, threads=arguments.threads
    )
    answer: dict[str, Any] = {"ready": True}
    while True:
        print(json.dumps(answer), flush=True)
        if not sys.stdin.readline():
            return 0
        answer = {"seconds": trainer.step(rows, arguments.micro_batch_rows)}


if __name__ == "__main__":
    sys.exit(main())
