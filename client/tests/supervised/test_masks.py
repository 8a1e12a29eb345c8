"""Masks: exactly what the model has to produce, end token included, whatever the template does."""

import json
from pathlib import Path
from typing import Any

import pytest
from client.tests.doubles.tokenizers import CHATML, STRIPS_THINKING, files

from opentinker.errors import TemplateProblem
from opentinker.supervised.masks import Encoded, encode_chat, encode_completion
from opentinkerapi.runtime.render import ChatTokenizer

HEAD = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TAGGED = (
    HEAD + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}" + PROMPT
)
TAG_WITHOUT_END = TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
TAG_AROUND_HEADER = (
    "{% for m in messages %}{% generation %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}\n{% endfor %}" + PROMPT
)
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "42?"},
    {"role": "assistant", "content": "yes, 42"},
]


def tokenizer(template: str | None = CHATML, **more: Any) -> ChatTokenizer:
    return ChatTokenizer(files(template, **more))


def trained(tokens: ChatTokenizer, row: Encoded) -> list[str]:
    """The texts of the runs that are trained on."""
    runs: list[list[int]] = [[]]
    for token, weight in zip(row.token_ids, row.weights, strict=True):
        if weight:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokens.decode(run, skip_special_tokens=False) for run in runs if run]


def flags(messages: list[dict[str, Any]]) -> list[float]:
    return [float(message["role"] == "assistant") for message in messages]


@pytest.mark.parametrize("template", [CHATML, TAGGED, TAG_WITHOUT_END])
def test_every_assistant_turn_with_its_end_token_and_nothing_else(template: str) -> None:
    tokens = tokenizer(template)
    (row,) = encode_chat(tokens, TALK, None, flags(TALK))
    assert trained(tokens, row) == ["4<|im_end|>", "yes, 42<|im_end|>"]
    # The ids are those of the rendered conversation, up to its last end token.
    whole = tokens.render(TALK, add_generation_prompt=False)
    assert row.token_ids == whole[: len(row.token_ids)]
    assert tokens.decode(whole[len(row.token_ids) :]).strip() == ""


def test_each_turn_is_predicted_from_the_prompt_of_the_sampler() -> None:
    """The tokens before a turn are, to the id, what inference would be prompted with."""
    tokens = tokenizer()
    (row,) = encode_chat(tokens, TALK, None, flags(TALK))
    starts = [i for i, weight in enumerate(row.weights) if weight and not row.weights[i - 1]]
    assert [row.token_ids[:start] for start in starts] == [tokens.render(TALK[:2]), tokens.render(TALK[:4])]


def test_weights_belong_to_their_turns_and_context_after_the_last_is_left_out() -> None:
    tokens = tokenizer()
    (row,) = encode_chat(tokens, [*TALK, {"role": "user", "content": "more"}], None, [0, 0, -0.5, 0, 2, 0])
    assert {weight for weight in row.weights if weight} == {-0.5, 2.0}
    assert "more" not in tokens.decode(row.token_ids)
    (first,) = encode_chat(tokens, TALK, None, [0, 0, 1, 0, 0])
    assert trained(tokens, first) == ["4<|im_end|>"]
    assert len(first.token_ids) < len(row.token_ids)


def test_b64_tokens_that_merge_across_the_border_lose_nothing() -> None:
    """The prompt ends with "4" and the reply begins with "2": as one text they would be one token."""
    end = "{% if m['role'] == 'assistant' %}<|im_end|>{% endif %}"
    template = "{% for m in messages %}{{ m['content'] }}" + end + "{% endfor %}"
    tokens = tokenizer(template)
    talk = [{"role": "user", "content": "x4"}, {"role": "assistant", "content": "2y"}]
    assert len(tokens.encode("42")) == 1
    (row,) = encode_chat(tokens, talk, None, [0, 1])
    assert trained(tokens, row) == ["2y<|im_end|>"]
    assert row.token_ids[:2] == tokens.encode("x4")
    longer = [*talk, {"role": "user", "content": "4"}, {"role": "assistant", "content": "2"}]
    (both,) = encode_chat(tokens, longer, None, [0, 1, 0, 1])
    assert trained(tokens, both) == ["2y<|im_end|>", "2<|im_end|>"]
    plain = encode_completion(tokens, "x4", "2y", 1.0)
    assert trained(tokens, plain) == ["2y<|im_end|>"]


def test_b30_b67_a_reply_of_one_token_is_trained_with_its_end_token() -> None:
    """An end token that also pads is the model's to say like any other: nothing here pads, or knows of it."""
    made = files(CHATML)
    config = json.loads(made["tokenizer_config.json"])
    config["pad_token"] = config["eos_token"]
    tokens = ChatTokenizer({**made, "tokenizer_config.json": json.dumps(config).encode()})
    row = encode_completion(tokens, "2 + 2 =", "4", 1.0)
    assert trained(tokens, row) == ["4<|im_end|>"]
    assert [i for i, weight in enumerate(row.weights) if weight] == [
        len(row.token_ids) - 2,
        len(row.token_ids) - 1,
    ]
    (chat,) = encode_chat(tokens, TALK[:3], None, flags(TALK[:3]))
    assert sum(map(bool, chat.weights)) == 2


def test_special_tokens_spelled_in_a_message_end_no_turn() -> None:
    tokens = tokenizer(TAGGED)
    attack = "say <|im_end|> and go on"
    talk = [{"role": "user", "content": "<|im_end|>?"}, {"role": "assistant", "content": attack}]
    (row,) = encode_chat(tokens, talk, None, [0, 1])
    assert trained(tokens, row) == [attack + "<|im_end|>"]
    end = tokens.special_tokens["<|im_end|>"]
    assert row.token_ids.count(end) == 2
    assert row.token_ids == tokens.render(talk, add_generation_prompt=False)[: len(row.token_ids)]


THINKING = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "<think>hm</think>A"},
    {"role": "user", "content": "b?"},
    {"role": "assistant", "content": "plain B"},
    {"role": "user", "content": "c?"},
    {"role": "assistant", "content": "<think>so</think>C"},
]


def test_rewritten_history_is_refused_by_name_or_split_never_trained_on_silently() -> None:
    tokens = tokenizer(STRIPS_THINKING)
    with pytest.raises(
        TemplateProblem, match=r"writes messages\[0:2\] differently once others follow.*<think>"
    ):
        encode_chat(tokens, THINKING, None, flags(THINKING))
    rows = encode_chat(tokens, THINKING, None, flags(THINKING), "split")
    assert [trained(tokens, row) for row in rows] == [
        ["<think>hm</think>A<|im_end|>"],
        ["plain B<|im_end|>", "<think>so</think>C<|im_end|>"],
    ]
    # Each row shows what the sampler is prompted with at that turn.
    assert rows[1].token_ids[: rows[1].weights.index(1.0)] == tokens.render(THINKING[:3])
    # A last turn alone is sampled after the rewritten history: nothing to refuse.
    (last,) = encode_chat(tokens, THINKING, None, [0, 0, 0, 0, 0, 1])
    assert trained(tokens, last) == ["<think>so</think>C<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        # The prompt opens a thought that the written turn does not have.
        (
            CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"),
            "prompts for messages.* in one way",
        ),
        (CHATML.replace("<|im_end|>", ""), "none of the model's end tokens"),
        (CHATML.replace("<|im_end|>", "<|im_end|> over and out"), "behind the end token"),
        (TAG_AROUND_HEADER, "generation tag .* stands around .*assistant"),
        (CHATML + "{% generation %}{% endgeneration %}", "none around messages"),
    ],
)
def test_templates_that_cannot_be_trained_with_are_named(template: str, problem: str) -> None:
    with pytest.raises(TemplateProblem, match=problem):
        encode_chat(tokenizer(template), TALK, None, flags(TALK))


def test_a_tag_may_leave_out_a_part_of_a_turn_but_not_its_end() -> None:
    tokens = tokenizer(
        HEAD + "{% if m['role'] == 'assistant' %}> {% generation %}{{ m['content'] }}{% endgeneration %} <"
        "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}" + PROMPT
    )
    (row,) = encode_chat(tokens, TALK[:3], None, flags(TALK[:3]))
    assert trained(tokens, row) == ["4", "<|im_end|>"]


def test_without_a_template_the_text_is_that_of_the_rollouts() -> None:
    from opentinker.environments.content import Message
    from opentinker.rollout.renderer import Renderer

    tokens = tokenizer(None)
    talk = TALK[1:]
    (row,) = encode_chat(tokens, talk, None, flags(talk))
    assert trained(tokens, row) == ["4<|im_end|>", "yes, 42<|im_end|>"]
    renderer = Renderer(tokens)
    first = renderer.first([Message("user", "2 + 2?")])
    reply = [*tokens.encode("4"), tokens.eos_ids[0]]
    glue = renderer.follow([Message("user", "2 + 2?")], "4", reply, [Message("user", "42?")])
    assert glue is not None
    prompt = [*first, *reply, *glue]
    assert row.token_ids[: len(prompt)] == prompt
    assert row.weights[len(prompt)] == 1.0
    with pytest.raises(TemplateProblem, match="no chat template"):
        encode_chat(tokens, talk, [{"name": "f"}], flags(talk))


@pytest.mark.slow  # transformers takes seconds to load
def test_masks_of_tagged_templates_equal_those_of_transformers(tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_model_dir)
    made = {path.name: path.read_bytes() for path in tiny_model_dir.iterdir() if path.suffix == ".json"}
    ours = ChatTokenizer({**made, "chat_template.jinja": TAGGED.encode()})
    for talk in (TALK, THINKING, [*TALK[:2], {"role": "assistant", "content": " ß日本🙂\n\n"}]):
        wanted = theirs.apply_chat_template(
            talk, chat_template=TAGGED, return_dict=True, return_assistant_tokens_mask=True
        )
        (row,) = encode_chat(ours, talk, None, flags(talk))
        count = len(row.token_ids)
        assert row.token_ids == list(wanted["input_ids"])[:count]
        assert [int(weight) for weight in row.weights] == list(wanted["assistant_masks"])[:count]
        assert not any(wanted["assistant_masks"][count:])
