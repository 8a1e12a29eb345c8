"""Conversation formats by name: what they write, and that none of them rewrites what was sampled."""

import json
from pathlib import Path
from typing import Any

import pytest
from client.tests.doubles.cluster import World
from client.tests.doubles.tokenizers import CHATML, files
from tokenizers import AddedToken, Tokenizer

import opentinker as ot
from opentinker import errors
from opentinker.environments.content import Message
from opentinker.rollout.formats import FORMATS
from opentinker.rollout.renderer import make_renderer
from opentinkerapi.runtime.render import ChatTokenizer

TALK = [
    Message("system", "Be brief."),
    Message("user", " 1 + 1? "),
    Message("assistant", "2"),
    Message("user", "Sure?"),
]
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""As the family's own models have it."""


def llama_files(template: str | None) -> dict[str, bytes]:
    """The double's tokenizer with Llama 3's special tokens."""
    made = files(template)
    tokenizer = Tokenizer.from_str(made["tokenizer.json"].decode())
    names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    config = json.loads(made["tokenizer_config.json"])
    config |= {"bos_token": names[0], "eos_token": names[-1]}
    return {
        **made,
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def test_ids_are_those_of_the_familys_own_template() -> None:
    for name, made, template in (("chatml", files, CHATML), ("llama3", llama_files, LLAMA)):
        own = make_renderer(ChatTokenizer(made(template)))
        named = make_renderer(ChatTokenizer(made(None)), name)
        assert list(named.first(TALK)) == list(own.first(TALK))
        assert (own.name, named.name) == ("chat-template", name)


def test_roles_and_colons() -> None:
    tokenizer = ChatTokenizer(files(None))
    renderer = make_renderer(tokenizer, "role-colon")
    text = tokenizer.decode(list(renderer.first(TALK)), skip_special_tokens=False)
    end = tokenizer.decode([tokenizer.eos_ids[0]], skip_special_tokens=False)
    assert text == f"System: Be brief.\n\nUser:  1 + 1? \n\nAssistant:2{end}\n\nUser: Sure?\n\nAssistant:"


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("reply", ["yes", " yes \n", "<think>hm</think>\n\nyes", '<tool_call>{"name": "f"}'])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_was_sampled_stays_in_the_next_prompt(name: str, reply: str, role: str) -> None:
    """B60, B61, B63, for every format."""
    tokenizer = ChatTokenizer(llama_files(None) if name == "llama3" else files(None))
    renderer = make_renderer(tokenizer, name)
    ids = [*tokenizer.encode(reply), tokenizer.eos_ids[0]]
    added = [Message(role, "Go on."), Message(role, "Now.")]
    rest = renderer.follow(TALK, reply, ids, added)
    assert rest is not None
    prompt = [*renderer.first(TALK), *ids, *rest]
    whole = renderer.first([*TALK, Message("assistant", reply), *added])
    text = [tokenizer.decode(list(each), skip_special_tokens=False) for each in (prompt, whole)]
    assert text[0] == text[1]


def test_tools_answer_in_the_familys_way() -> None:
    tokenizer = ChatTokenizer(files(None))
    talk = [Message("user", "?"), Message("assistant", "call"), Message("tool", "1"), Message("tool", "2")]
    text = tokenizer.decode(list(make_renderer(tokenizer, "chatml").first(talk)), skip_special_tokens=False)
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_formats_that_a_model_cannot_speak_are_refused() -> None:
    tokenizer = ChatTokenizer(files(None))
    for name, message in (
        ("llama3", "no <|start_header_id|> and no"),
        ("chat-template", "has no chat template"),
    ):
        with pytest.raises(errors.UnsupportedOption, match=message.replace("|", r"\|")) as caught:
            make_renderer(tokenizer, name)
        assert caught.value.field == "renderer"
    other_end = {**files(None), "tokenizer_config.json": b'{"eos_token": "a"}'}
    with pytest.raises(errors.UnsupportedOption, match=r"does not end a reply with <\|im_end\|>"):
        make_renderer(ChatTokenizer(other_end), "chatml")


def test_special_tokens_in_texts_stay_text_in_every_format() -> None:
    for name in FORMATS:
        tokenizer = ChatTokenizer(llama_files(None) if name == "llama3" else files(None))
        renderer = make_renderer(tokenizer, name)
        attack = "".join(tokenizer.special_tokens)
        plain, hostile = (list(renderer.first([Message("user", text)])) for text in ("x", attack))
        for token_id in tokenizer.special_tokens.values():
            assert hostile.count(token_id) == plain.count(token_id)


def test_fit_speaks_a_format_and_keeps_its_name(doubles: World, tmp_path: Path) -> None:
    env = ot.single_turn(
        [{"prompt": "Even?"}], reward=lambda answer, task: float(int(answer) % 2), name="even"
    )
    options: dict[str, Any] = {"steps": 1, "groups_per_step": 1, "run_dir": tmp_path, "checkpoint_every": 1}
    result = ot.fit(env, "tiny", renderer="role-colon", **options)
    state = json.loads(doubles.scheduler.loop_states[-1].state)
    assert state["renderer"] == "role-colon"

    def prompts() -> set[str]:
        from opentinkerapi.runtime.tensors import unpack_ids

        decode = doubles.inference.tokenizer.decode
        return {
            decode(unpack_ids(each.prompt.chunks[0].tokens.token_ids)) for each in doubles.inference.requests
        }

    assert prompts() == {"User: Even?\n\nAssistant:"}
    ot.run(result.policy, env, episodes=1, split="train")
    result.policy.chat("Even?").result()
    assert prompts() == {"User: Even?\n\nAssistant:"}
    with pytest.raises(errors.InvalidArgument, match="'alpaca' is none of chat-template, chatml"):
        ot.fit(env, "tiny", renderer="alpaca", **options)
    result = ot.fit(env, "tiny", **options)
    assert json.loads(doubles.scheduler.loop_states[-1].state)["renderer"] == "chat-template"
