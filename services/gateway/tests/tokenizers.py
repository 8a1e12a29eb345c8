"""Tokenizer files with one token a byte, and chat templates of several kinds."""

import json

from opentinker_kit.testing.models import byte_tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Ignores tools."""

TAGGED = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}"
    "<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

BARE = TAGGED.replace("<tool_call>\n", "").replace("\n</tool_call>", "")

STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def files(template: str | None = CHATML) -> dict[str, bytes]:
    """Tokenizer files by name; the end token is <|im_end|>."""
    config: dict[str, object] = {"eos_token": "<|im_end|>"}
    if template is not None:
        config["chat_template"] = template
    return {
        "tokenizer.json": byte_tokenizer(SPECIAL).to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
