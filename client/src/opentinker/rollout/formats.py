"""Conversation formats by name, beside the model's own chat template.

    chatml       <|im_start|>user\\n...<|im_end|>\\n                                  Qwen, SmolLM, many
    others llama3       <|start_header_id|>user<|end_header_id|>\\n\\n...<|eot_id|>
    role-colon   User: ...\\n\\nAssistant:...                                         models without a
    template

They are chat templates like any other, so all that holds of those holds of them. What an assistant said
stands in them as it was said: none of them rewrites history.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentinker.errors import Reason, UnsupportedOption, invalid

if TYPE_CHECKING:
    from opentinkerapi.runtime.render import ChatTokenizer

CHAT_TEMPLATE = "chat-template"
PLAIN_TEXT = "plain-text"


@dataclass(frozen=True, slots=True)
class Format:
    """A chat template, the special tokens that it cannot do without, and the one that ends a reply: "" is the
    model's own.
    """

    template: str
    tokens: tuple[str, ...]
    end: str


_TEXT_ONLY = (
    "{% for m in messages %}{% if m['content'] is not string %}"
    "{{ raise_exception('this format shows text only') }}{% endif %}{% endfor %}"
)

FORMATS = {
    "chatml": Format(
        _TEXT_ONLY + "{% for m in messages %}"
        "{% if m['role'] == 'tool' %}"
        "{% if not loop.previtem or loop.previtem['role'] != 'tool' %}<|im_start|>user{% endif %}"
        "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
        "{% if not loop.nextitem or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
        "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    "llama3": Format(
        _TEXT_ONLY + "{{ bos_token }}{% for m in messages %}"
        "{% set role = 'ipython' if m['role'] == 'tool' else m['role'] %}"
        "{% set text = m['content'] if m['role'] == 'assistant' else m['content'] | trim %}"
        "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + text + '<|eot_id|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "role-colon": Format(
        _TEXT_ONLY + "{{ bos_token }}{% for m in messages %}"
        "{% if m['role'] == 'assistant' %}{{ 'Assistant:' + m['content'] }}{{ eos_token }}"
        "{% else %}{{ m['role'] | capitalize }}: {{ m['content'] }}{% endif %}{{ '\n\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}",
        (),
        "",
    ),
}
NAMES = (CHAT_TEMPLATE, *FORMATS)


def check_name(name: str, field: str = "renderer") -> None:
    """InvalidArgument for a name that is none; "" is the model's own."""
    if name and name not in NAMES:
        raise invalid(field, f"{name!r} is none of {', '.join(NAMES)}")


def formatted(tokenizer: "ChatTokenizer", name: str) -> "ChatTokenizer":
    """The tokenizer with the template of a format. UnsupportedOption where the model lacks its tokens, or
    would not end a reply as the format does.
    """
    check_name(name)
    if name not in FORMATS:
        return tokenizer
    chosen = FORMATS[name]
    problem = ""
    if missing := [token for token in chosen.tokens if token not in tokenizer.special_tokens]:
        problem = f"the model's vocabulary has no {' and no '.join(missing)}"
    elif chosen.end and tokenizer.special_tokens[chosen.end] not in tokenizer.eos_ids:
        problem = f"the model does not end a reply with {chosen.end}"
    if problem:
        raise UnsupportedOption(
            f"the format {name!r} cannot be used: {problem}",
            reason=Reason.UNSUPPORTED_OPTION,
            field="renderer",
        )
    return tokenizer.with_template(chosen.template)
