"""`sft()` on the real embedded stack: trainer and transformers engine, tiny model, float32."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opentinker as ot

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAINER = ot.ServerOptions(engine="torch", dtype="float32", context_tokens=512)
INFERENCE = ot.ServerOptions(engine="transformers", dtype="float32", context_tokens=512)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ot.Cluster]:
    with ot.connect(state_dir=tmp_path_factory.mktemp("stack")) as opened:
        yield opened


def chats(first: int, count: int) -> list[dict[str, Any]]:
    """Conversations of two turns: the letter after a letter."""
    letters = [chr(ord("a") + (first + 7 * i) % 25) for i in range(2 * count)]
    return [
        {
            "messages": [
                {"role": "user", "content": f"{one}?"},
                {"role": "assistant", "content": chr(ord(one) + 1)},
                {"role": "user", "content": f"{two}?"},
                {"role": "assistant", "content": chr(ord(two) + 1)},
            ]
        }
        for one, two in zip(letters[::2], letters[1::2], strict=True)
    ]


def tune(cluster: ot.Cluster, model: Path, run_dir: Path, **options: Any) -> ot.SftResult:
    defaults: dict[str, Any] = {
        "tuning": ot.LoRA(rank=4),
        "batch_size": 4,
        "learning_rate": 3e-3,
        "checkpoint_every": 5,
        "seed": 3,
        "trainer": TRAINER,
        "inference": INFERENCE,
        "progress": False,
    }
    data = options.pop("data", chats(0, 24))
    return ot.sft(data, str(model), run_dir=run_dir, cluster=cluster, **{**defaults, **options})


def test_the_held_out_loss_falls_and_what_was_learned_is_served(
    cluster: ot.Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    result = tune(cluster, tiny_model_dir, tmp_path, steps=30, evaluation=chats(3, 6), evaluation_every=15)
    losses = [found.loss for _, found in result.evaluations]
    assert losses[0] > losses[1] > losses[2]
    assert losses[0] - losses[2] > 0.5
    # The first training loss is that of the untrained model, as the held-out one.
    assert result.losses[0] == pytest.approx(losses[0], abs=0.3)
    policy = result.policy
    assert policy.version == 1
    tokenizer = policy.tokenizer().result()
    (row,) = ot.supervised_samples(chats(5, 1), tokenizer, max_tokens=200)
    (trained,) = policy.forward([row]).result().logprobs
    (served,) = policy.score([row.token_ids]).result()
    mask = np.asarray(row.loss_mask, dtype=bool)
    assert trained is not None
    assert np.abs(served[mask] - trained[mask]).max() < 1e-4
    assert policy.chat("c?", ot.SamplingParams(max_tokens=3)).result() is not None


def test_b30_b67_the_first_token_of_a_reply_and_its_end_token_are_trained(
    cluster: ot.Cluster, tiny_model_dir: Path
) -> None:
    policy = cluster.create_policy(
        str(tiny_model_dir), tuning=ot.LoRA(rank=4), trainer=TRAINER, serve=False
    ).result()
    tokenizer = policy.tokenizer().result()
    (row,) = ot.supervised_samples([{"prompt": "2 + 2 =", "completion": "4"}], tokenizer, max_tokens=100)
    assert row.loss_tokens == 2
    only = replace(row, loss_mask=[*row.loss_mask[:-1], 0])
    (logprobs,) = policy.forward([row]).result().logprobs
    assert logprobs is not None
    for sample, tokens in ((only, [-2]), (row, [-2, -1])):
        learned = policy.forward_backward([sample], ot.CrossEntropy(), denominator=1.0).result()
        (loss,) = learned.components.values()
        assert loss.sum == pytest.approx(-sum(float(logprobs[token]) for token in tokens), abs=1e-5)
        assert loss.weight == len(tokens)
    assert policy.optim_step(ot.AdamW(lr=1e-3)).result().grad_norm > 0


def test_b99_ten_steps_are_five_and_a_resumed_five_to_the_bit(
    cluster: ot.Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    straight = tune(cluster, tiny_model_dir, tmp_path / "a", steps=10, evaluation=chats(3, 2))
    first = tune(cluster, tiny_model_dir, tmp_path / "b", steps=5, evaluation=chats(3, 2))
    again = tune(cluster, tiny_model_dir, tmp_path / "b", steps=10, evaluation=chats(3, 2), resume=first.run)
    assert first.losses + again.losses == straight.losses
    assert again.steps == 10
    assert again.policy.published.sha256 == straight.policy.published.sha256
    assert again.held_out is not None
    assert straight.held_out is not None
    assert again.held_out.loss == straight.held_out.loss
