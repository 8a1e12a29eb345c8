"""The baseline of `overhead`: GRPO as one would write it in one process, with no service around it.

vLLM samples with merged weights, peft trains, and each step ends with merge, save and reload. It does the
same work as `fit()`: the same prompts, the same number of new tokens, the same rows, the same precision.
Run as a program it prints one JSON line a step.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.recorded import Recording, StepTime, advantages, load_recording


class PlainLoop:
    """vLLM and a peft model side by side in this process."""

    def __init__(self, model_dir: Path, recording: Recording, work_dir: Path) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from vllm import LLM

        self._torch = torch
        self._recording = recording
        self._work_dir = work_dir
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._llm = LLM(
            str(model_dir),
            dtype=recording.sampler_dtype,
            enforce_eager=True,
            max_model_len=recording.context_tokens,
            block_size=32,
            logprobs_mode="processed_logprobs",
        )
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, recording.trainer_dtype))
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        self._model = get_peft_model(
            base, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=targets)
        )
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        for parameter in trainable:
            parameter.data = parameter.data.float()
        self._trainable = trainable
        self._optimizer = torch.optim.AdamW(trainable, lr=2e-4, weight_decay=0.0)

    def step(self, index: int) -> StepTime:
        """One step: sample, train on the rows with an advantage, merge, save and reload."""
        begin = time.perf_counter()
        rows = self._sample(index)
        sampled = time.perf_counter()
        self._train(rows)
        trained = time.perf_counter()
        self._publish()
        end = time.perf_counter()
        return StepTime(end - begin, sampled - begin, trained - sampled, end - trained, len(rows))

    def _sample(self, index: int) -> list[tuple[list[int], list[int], list[float], float]]:
        from vllm import SamplingParams

        recording = self._recording
        prompts = [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in recording.prompts[index]
        ]
        params = [
            SamplingParams(
                n=recording.group_size,
                temperature=1.0,
                max_tokens=recording.new_tokens,
                ignore_eos=True,
                seed=1000 * index + 100 * group,
                logprobs=0,
            )
            for group in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        rows = []
        for group, output in enumerate(outputs):
            values = advantages(recording.successes[index][group], recording.group_size)
            for completion, value in zip(output.outputs, values, strict=True):
                ids = list(completion.token_ids)
                logprobs = [
                    entry[token].logprob for entry, token in zip(completion.logprobs, ids, strict=True)
                ]
                if value != 0.0:
                    rows.append((prompts[group], ids, logprobs, value))
        return rows

    def _train(self, rows: list[tuple[list[int], list[int], list[float], float]]) -> None:
        torch = self._torch
        recording = self._recording
        denominator = recording.groups * recording.group_size * recording.new_tokens
        rows = sorted(rows, key=lambda row: len(row[0]))
        for start in range(0, len(rows), recording.micro_batch_rows):
            batch = rows[start : start + recording.micro_batch_rows]
            length = max(len(prompt) + len(ids) for prompt, ids, _, _ in batch)
            tokens = torch.zeros(len(batch), length, dtype=torch.long)
            attention = torch.zeros(len(batch), length, dtype=torch.long)
            for row, (prompt, ids, _, _) in enumerate(batch):
                tokens[row, : len(prompt) + len(ids)] = torch.tensor(prompt + ids)
                attention[row, : len(prompt) + len(ids)] = 1
            decoder = self._model.get_base_model()
            hidden = decoder.model(input_ids=tokens, attention_mask=attention).last_hidden_state
            picked, targets, old, values = [], [], [], []
            for row, (prompt, ids, logprobs, value) in enumerate(batch):
                picked.append(hidden[row, len(prompt) - 1 : len(prompt) - 1 + len(ids)])
                targets += ids
                old += logprobs
                values += [value] * len(ids)
            logits = decoder.lm_head(torch.cat(picked)).float()
            logprob = torch.log_softmax(logits, -1).gather(-1, torch.tensor(targets)[:, None])[:, 0]
            ratio = torch.exp(logprob - torch.tensor(old))
            weight = torch.tensor(values)
            loss = torch.maximum(-ratio * weight, -ratio.clamp(0.8, 1.28) * weight).sum() / denominator
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trainable, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _publish(self) -> None:
        from safetensors.torch import save_file

        torch = self._torch
        merged = {}
        with torch.no_grad():
            for name, module in self._model.get_base_model().named_modules():
                if hasattr(module, "lora_A"):
                    delta = module.get_delta_weight("default")
                    weight = module.base_layer.weight.float() + delta
                    merged[f"{name}.weight"] = weight.to(getattr(torch, self._recording.sampler_dtype))
            for name, tensor in self._model.get_base_model().state_dict().items():
                if "lora_" not in name and "base_layer" not in name and name != "lm_head.weight":
                    merged[name] = tensor.to(getattr(torch, self._recording.sampler_dtype)).contiguous()
        save_file(merged, self._work_dir / "model.safetensors", metadata={"format": "pt"})
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self._work_dir)})
        self._llm.reset_prefix_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--recording", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    recording = load_recording(arguments.recording)
    loop = PlainLoop(arguments.model_dir, recording, arguments.work_dir)
    for index in range(len(recording.prompts)):
        sys.stdout.write(json.dumps({"plain_step": index, **asdict(loop.step(index))}) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
