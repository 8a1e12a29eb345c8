"""Adapters that peft made, through import, training, vLLM and export: the same logprobs everywhere (B86).

Several ranks and sets of layers, in float32, all at once on one trainer and one vLLM.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import opentinker as ot
from opentinker.cli.app import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

PROMPT = (5, 17, 3, 99, 42, 8)
PARAMS = ot.SamplingParams(max_tokens=12, ignore_eos=True)
BOUND = 1e-4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ot.Cluster]:
    with ot.connect(state_dir=tmp_path_factory.mktemp("stack")) as opened:
        yield opened


def make_adapter(directory: Path, model_dir: Path, rank: int, targets: Sequence[str], seed: int) -> Path:
    """A random adapter, saved by peft itself."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank + 5, target_modules=list(targets), task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    # Of the output layer peft would write the base's own weights too.
    wrapped.save_pretrained(directory, save_embedding_layers=False)
    return directory


def loaded_by_peft(model_dir: Path, adapter: Path, ids: Sequence[int], count: int) -> list[float]:
    """Logprobs of the last `count` tokens, by nothing of ours."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([list(ids)])).logits[0], dim=-1)
    return [float(logprobs[i - 1, ids[i]]) for i in range(len(ids) - count, len(ids))]


def test_the_same_logprobs_everywhere(cluster: ot.Cluster, tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = ot.ServerOptions(engine="torch", dtype="float32", context_tokens=256, max_lora_rank=32)
    inference = ot.ServerOptions(
        engine="vllm", dtype="float32", serving_mode="adapter", context_tokens=256, max_lora_rank=32
    )

    def create(adapter: Path) -> ot.Policy:
        return cluster.create_policy(
            str(tiny_model_dir), from_weights=adapter, trainer=trainer, inference=inference
        ).result()

    cases = [(1, ATTENTION), (8, MLP), (16, (*ATTENTION, *MLP)), (5, ("q_proj", "down_proj"))]
    policies = []
    for number, (rank, targets) in enumerate(cases):
        adapter = make_adapter(tmp_path / f"a{number}", tiny_model_dir, rank, targets, number)
        policies.append((create(adapter), adapter))
    base = policies[0][0]
    for policy, adapter in policies:
        completions = policy.sample(PROMPT, PARAMS, n=4, seed=3).result()
        rows = [
            ot.TrainSample(
                token_ids=[*PROMPT, *each.token_ids],
                loss_mask=[0] * len(PROMPT) + [1] * len(each.token_ids),
            )
            for each in completions
        ]
        trained = policy.forward(rows).result().logprobs
        unadapted = base.forward(rows, base_model=True).result().logprobs
        for row, completion, mine, without in zip(rows, completions, trained, unadapted, strict=True):
            assert mine is not None
            assert without is not None
            assert mine[len(PROMPT) :] == pytest.approx(np.asarray(completion.logprobs), abs=BOUND)
            # The test can fail: without the adapter they are others.
            assert np.abs(mine - without).max() > 100 * BOUND
            ids = [int(token) for token in row.token_ids]
            peft_says = loaded_by_peft(tiny_model_dir, adapter, ids, 12)
            assert mine[len(PROMPT) :] == pytest.approx(peft_says, abs=BOUND)
        exported = policy.export(tmp_path / f"out-{policy.name.rpartition('/')[2]}").result()
        ids = [int(token) for token in rows[0].token_ids]
        assert loaded_by_peft(tiny_model_dir, exported, ids, 12) == pytest.approx(
            trained[0][len(PROMPT) :],  # type: ignore[index]
            abs=BOUND,
        )

    # What vLLM cannot adapt beside the base is refused by name, and vLLM goes on.
    output = create(make_adapter(tmp_path / "output", tiny_model_dir, 4, ("lm_head",), 9))
    with pytest.raises(ot.errors.FailedPrecondition, match="lm_head"):
        output.sample(PROMPT, PARAMS).result()
    assert base.sample(PROMPT, PARAMS).result()

    # From the command line, by name, attached to the same stack.
    name = f"{base.name}/versions/0"
    command = ["export", name, str(tmp_path / "cli"), "--state-dir", str(cluster.state_dir)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "cli").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }

    # An export is whole or not there, and never over something else.
    with pytest.raises(ot.errors.AlreadyExists):
        base.export(tmp_path / "a0").result()
    with pytest.raises(ot.errors.NotFound):
        cluster.export(f"{base.name}/versions/99", tmp_path / "none").result()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".") or path.name == "none"]
    for policy in (*(policy for policy, _ in policies), output):
        cluster.wait(policy.job.finish())
