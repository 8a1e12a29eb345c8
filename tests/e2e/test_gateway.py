"""OpenAI's own client against policies of ours, on the real embedded stack: trained and served, played and
trained.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import opentinker as ot
from opentinker_gateway.domain.messages import Call, Message
from opentinker_gateway.domain.prompts import ChatPrompts, Setting
from opentinkerapi.runtime.render import CONFIG_FILE, TOKENIZER_FILE, ChatTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAINER = ot.ServerOptions(engine="torch", dtype="float32", context_tokens=2048)
INFERENCE = ot.ServerOptions(engine="transformers", dtype="float32", context_tokens=2048)
TUNING = ot.Full()
TOKENIZER = (TOKENIZER_FILE, CONFIG_FILE)
STEPS = 150
"""Until the model knows the conversation by heart."""
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
QUESTION = "2 + 3?"
CONVERSATION = [
    Message("user", QUESTION),
    Message("assistant", "", (Call("add", '{"a": 2, "b": 3}'),)),
    Message("tool", "5", call_id="x"),
    Message("assistant", "It is 5."),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ot.Cluster]:
    with ot.connect(state_dir=tmp_path_factory.mktemp("stack")) as opened:
        yield opened


def client_of(cluster: ot.Cluster, url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=cluster.api_key, timeout=300)


def as_chat(tokenizer: ChatTokenizer) -> dict[str, Any]:
    """The conversation as the gateway shows it to a model whose template knows no tools."""
    written = ChatPrompts(tokenizer)._dicts(CONVERSATION, Setting((ADD,)))
    return {"messages": written}


def test_a_policy_trained_by_fit_holds_a_conversation_with_tools(
    cluster: ot.Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = str(tiny_model_dir)
    tokenizer = ChatTokenizer({name: (tiny_model_dir / name).read_bytes() for name in TOKENIZER})
    chat = as_chat(tokenizer)
    taught = ot.sft(
        [chat] * 4,
        model,
        tuning=TUNING,
        steps=STEPS,
        batch_size=1,
        learning_rate=3e-3,
        decay="linear",
        checkpoint_every=STEPS,
        run_dir=tmp_path / "sft",
        trainer=TRAINER,
        inference=INFERENCE,
        progress=False,
        cluster=cluster,
    )
    assert taught.checkpoint is not None
    assert taught.losses[-1] < 0.05
    result = ot.fit(
        env=ot.single_turn([{"prompt": QUESTION}], reward=lambda task, text: float(len(text) % 2)),
        model=model,
        tuning=TUNING,
        from_checkpoint=taught.checkpoint,
        algorithm=ot.GRPO(group_size=4),
        groups_per_step=2,
        steps=2,
        learning_rate=1e-6,
        sampling=ot.SamplingParams(max_tokens=8, temperature=1.5),
        run_dir=tmp_path / "fit",
        trainer=TRAINER,
        inference=INFERENCE,
        progress=False,
        cluster=cluster,
    )
    deployment = result.policy.deploy("adder").result()
    with client_of(cluster, deployment.url) as client:
        assert deployment.name in [each.id for each in client.models.list()]
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        asked: dict[str, Any] = {
            "model": deployment.name,
            "tools": [ADD],
            "temperature": 0,
            "max_tokens": 120,
        }
        first = client.chat.completions.create(messages=messages, **asked)
        assert first.choices[0].finish_reason == "tool_calls", first.choices[0]
        calls = first.choices[0].message.tool_calls
        assert calls is not None
        assert calls[0].type == "function"
        arguments = json.loads(calls[0].function.arguments)
        messages += [
            first.choices[0].message.model_dump(),
            {"role": "tool", "tool_call_id": calls[0].id, "content": str(arguments["a"] + arguments["b"])},
        ]
        stream = client.chat.completions.create(messages=messages, stream=True, logprobs=True, **asked)
        text = ""
        logprobs: list[float] = []
        for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if choice.logprobs is not None:
                    logprobs += [entry.logprob for entry in choice.logprobs.content or []]
        assert text == "It is 5."
        assert len(logprobs) == len(text) + 1
        assert all(-0.7 < logprob <= 0 for logprob in logprobs)
        base = client.completions.create(model=model, prompt="2 + 2", max_tokens=3, temperature=0)
        assert base.usage is not None
        assert base.usage.completion_tokens <= 3
    deployment.delete().result()


def agent(client: openai.OpenAI, turns: int) -> str:
    """An agent that knows OpenAI's API and nothing else."""
    messages: list[Any] = [{"role": "user", "content": "Say something."}]
    for _ in range(turns):
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "More."}]
    return "".join(message["content"] or "" for message in messages if message["role"] == "assistant")


def test_an_agent_that_owns_its_loop_is_trained(cluster: ot.Cluster, tiny_model_dir: Path) -> None:
    policy = cluster.create_policy(
        str(tiny_model_dir), tuning=ot.LoRA(rank=4), seed=3, trainer=TRAINER, inference=INFERENCE
    ).result()
    trajectories = []
    for member in range(4):
        with ot.record_episode(policy, group="task", member=member, seed=member).result() as episode:
            client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, timeout=300)
            with client:
                said = agent(client, turns=2)
            trajectories.append(episode.finish(reward=float(len(said))).result())
    for trajectory in trajectories:
        assert len(trajectory.turns) == 2
        assert {version for segment in trajectory.segments for _, _, version in segment.spans} == {0}
        assert sum(sum(segment.loss_mask) for segment in trajectory.segments) == trajectory.sampled_tokens
    samples = ot.train_samples(ot.Batch.of(trajectories), advantage=ot.advantages.grpo)
    assert samples.loss_tokens == sum(trajectory.sampled_tokens for trajectory in trajectories)
    # What the trainer computes for the recorded ids is what the sampler drew them with.
    scored = policy.forward(samples).result()
    for row, logprobs in zip(samples, scored.logprobs, strict=True):
        assert logprobs is not None
        mask = np.asarray(row.loss_mask, dtype=bool)
        np.testing.assert_allclose(np.asarray(row.logprobs)[mask], logprobs[mask], atol=1e-4)
    if not samples.inert:
        policy.forward_backward(samples, ot.PPO(), denominator=samples.loss_tokens)
        assert policy.optim_step(ot.AdamW(lr=1e-3)).result().grad_norm > 0
        assert policy.publish().result().version == 1


def test_errors_of_the_gateway_are_typed(cluster: ot.Cluster, tiny_model_dir: Path) -> None:
    policy = cluster.create_policy(
        str(tiny_model_dir), tuning=ot.LoRA(rank=4), trainer=TRAINER, inference=INFERENCE
    ).result()
    with pytest.raises(ot.errors.NotFound):
        ot.record_episode(policy, version=99).result()
    with pytest.raises(ot.errors.UnsupportedOption, match="ignore_eos"):
        ot.record_episode(policy, sampling=ot.SamplingParams(ignore_eos=True))
    episode = ot.record_episode(policy).result()
    episode.close().result()
    with pytest.raises(ot.errors.EpisodeNotFound):
        episode.finish(reward=1.0).result()
