"""Records what the `trl` case trains on: completions of SmolLM2-135M-Instruct with their logprobs.

Rewards are made up (which half of a group is longer than its median), so that every row has an advantage.
python -m benchmarks.record_completions
"""

import json
import statistics
import sys

from benchmarks.train_trl import GROUP, RECORDED

PROMPTS = [
    "Name three animals that live in the sea.",
    "What is the capital of France, and what is it known for?",
    "Write a sentence about rain.",
    "Which is larger, 17 or 71? Say why.",
    "Give a short reason to learn a language.",
    "What do bees do in a garden?",
    "Explain in a few words what a library is.",
    "List two things to pack for a hike.",
]
NEW_TOKENS = 40


def main() -> int:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from opentinker_kit.models import resolve_model

    path = resolve_model("smollm2-135m-instruct", model_roots=[]).path
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(0)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in PROMPTS
    ]
    # All at once, padded on the left.
    longest = max(len(ids) for ids in prompts)
    pads = [longest - len(ids) for ids in prompts for _ in range(GROUP)]
    output = model.generate(
        torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts for _ in range(GROUP)]),
        attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(output.logits, 1)
    groups = []
    for number, ids in enumerate(prompts):
        completions, logprobs = [], []
        for row in range(number * GROUP, (number + 1) * GROUP):
            tokens = output.sequences[row, longest:].tolist()
            if tokenizer.eos_token_id in tokens:
                tokens = tokens[: tokens.index(tokenizer.eos_token_id) + 1]
            chosen = torch.log_softmax(logits[row, : len(tokens)].float(), -1)
            values = chosen.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
            completions.append(tokens)
            logprobs.append([round(value, 5) for value in values])
        middle = statistics.median(len(tokens) for tokens in completions)
        ranked = sorted(range(GROUP), key=lambda member: (len(completions[member]) <= middle, member))
        rewards = [1.0 if ranked.index(member) < GROUP // 2 else 0.0 for member in range(GROUP)]
        groups.append(
            {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs, "rewards": rewards}
        )
    RECORDED.write_text(json.dumps({"model": "smollm2-135m-instruct", "groups": groups}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
