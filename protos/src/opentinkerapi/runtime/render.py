"""Chat templates and tokenizers without transformers: text and messages to token ids, and back.

Built from a model's tokenizer files alone (bytes by file name, as GetTokenizer returns them). Templates are
untrusted code: they run in jinja's immutable sandbox with the settings that transformers uses, so that ids
equal `apply_chat_template`'s. Text never becomes a special token: where a message, a tool or a plain text
spells one, it is encoded as the characters it consists of. (Needs the extra `render`.)
"""

import copy
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from tokenizers import Tokenizer

from opentinkerapi.runtime import images
from opentinkerapi.runtime.token_bytes import TokenBytes

Message = Mapping[str, Any]

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
MODEL_FILE = "config.json"
FILES = (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE, GENERATION_FILE, MODEL_FILE, *images.FILES)
"""What a ChatTokenizer reads; all but tokenizer.json may be missing."""

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class RenderError(ValueError):
    """The messages cannot be rendered: no template, or the template refused them."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` stands around what an assistant says; its text is passed
    through.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


_TAG_BEGIN, _TAG_END = "\ue002", "\ue003"


class _MarkedGenerationTag(_GenerationTag):
    """The same with a character before and after, to find again what stands in between."""

    def parse(self, parser: Any) -> Any:
        scope = super().parse(parser)
        scope.body = [_output(_TAG_BEGIN, scope.lineno), *scope.body, _output(_TAG_END, scope.lineno)]
        return scope


class ChatTokenizer:
    """One model's tokenizer and chat template."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files` maps names of `FILES` to contents. ValueError if tokenizer.json is missing or
        unreadable.
        """
        if TOKENIZER_FILE not in files:
            raise ValueError(f"{TOKENIZER_FILE} is missing; files given: {sorted(files)}")
        self._source = files[TOKENIZER_FILE]
        try:
            self._tokenizer = _load(self._source)
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"{TOKENIZER_FILE} cannot be read: {error}") from error
        self._config = _json(files, CONFIG_FILE)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        self._guarded: tuple[Tokenizer, dict[str, str]] | None = None
        self._templates = _templates(files, self._config)
        self._environment = _environment(_GenerationTag)
        self._marking = _environment(_MarkedGenerationTag)
        self._compiled: dict[tuple[str, bool], jinja2.Template] = {}
        self._token_bytes: TokenBytes | None = None
        self.eos_ids: tuple[int, ...] = self._find_eos(files)
        """Token ids that end a reply, the tokenizer's own first."""
        self.images = images.ImageSettings.of_files(files)
        """What the model does with images; None: it takes none."""

    @property
    def has_template(self) -> bool:
        """Whether messages can be rendered."""
        return bool(self._templates)

    def with_template(self, template: str) -> "ChatTokenizer":
        """The same tokenizer with another chat template."""
        other = copy.copy(self)
        other._templates = {"default": template}
        other._compiled = {}
        return other

    @property
    def vocabulary_size(self) -> int:
        """Ids that the tokenizer can produce or decode, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Special tokens, by their text."""
        return self._special

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids [n] of a conversation. `options` are further variables of the template.

        RenderError if the model has no chat template or the template refuses the messages.
        """
        rendering = self.rendering(messages, tools, options=options)
        return rendering.ids(rendering.text(add_generation_prompt=add_generation_prompt))

    def rendering(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> "Rendering":
        """A conversation to be rendered in part or as a whole, as texts that can be compared."""
        spelled = self._spelled((messages, tools))
        return Rendering(self, messages, tools, dict(options or {}), spelled)

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the chat template makes of a conversation, for a person to read."""
        return self._fill(
            self._template(bool(tools), self._environment), messages, tools, add_generation_prompt, options
        )

    def _fill(
        self,
        template: jinja2.Template,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any] | None,
    ) -> str:
        named = {name: self._named(name) for name in _NAMED_TOKENS if self._named(name) is not None}
        try:
            return template.render(
                messages=messages,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **named,
                **(options or {}),
            )
        except jinja2.TemplateError as error:
            raise RenderError(f"the chat template refused the messages: {error}") from error
        except Exception as error:  # a template is code of others and may raise anything
            raise RenderError(f"the chat template failed on the messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids [n] of a text, without any special token."""
        tokenizer = self._guard()[0] if self._spelled(text) else self._tokenizer
        return self._ids(tokenizer, text)

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token alone, which need be no whole characters."""
        if self._token_bytes is None:
            self._token_bytes = TokenBytes(self._tokenizer)
        return self._token_bytes.of(ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids [n]."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    @staticmethod
    def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _spelled(self, value: Any) -> list[str]:
        """Special tokens that occur in any string within `value`, longest first."""
        texts = list(_strings(value))
        found = [token for token in self._special if any(token in text for text in texts)]
        return sorted(found, key=len, reverse=True)

    def _guard(self) -> tuple[Tokenizer, dict[str, str]]:
        """A tokenizer with the same ids in which special tokens have names that nobody can spell."""
        if self._guarded is None:
            nonce = secrets.token_hex(8)
            ordered = sorted(self._special, key=len, reverse=True)
            names = {token: f"<|{nonce}:{self._special[token]}|>" for token in ordered}
            guarded = _load(json.dumps(_rename(json.loads(self._source), names)).encode())
            for token, name in names.items():
                if guarded.token_to_id(name) != self._special[token]:
                    raise RenderError(f"special token {token!r} has no stable id in {TOKENIZER_FILE}")
            self._guarded = guarded, names
        return self._guarded

    def _template(self, with_tools: bool, environment: jinja2.Environment) -> jinja2.Template:
        if not self._templates:
            raise RenderError("the model has no chat template; give token ids or plain text instead")
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RenderError(f"the model has no default chat template, only {sorted(self._templates)}")
        key = name, environment is self._marking
        if key not in self._compiled:
            try:
                self._compiled[key] = environment.from_string(self._templates[name])
            except jinja2.TemplateError as error:
                raise RenderError(f"the chat template does not parse: {error}") from error
        return self._compiled[key]

    def _named(self, name: str) -> str | None:
        value = self._config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    def _find_eos(self, files: Mapping[str, bytes]) -> tuple[int, ...]:
        ids: list[int] = []
        eos = self._named("eos_token")
        if eos is not None and (token_id := self._tokenizer.token_to_id(eos)) is not None:
            ids.append(token_id)
        for name in (GENERATION_FILE, MODEL_FILE):
            value = _json(files, name).get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
        return tuple(dict.fromkeys(ids))


class Rendering:
    """Texts of one conversation, whole or up to a message, which share their beginnings where the template
    lets them.

    In these texts special tokens of the template are told apart from those that a message spells, so `ids`
    takes any piece of them.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        spelled: Sequence[str],
    ) -> None:
        self._owner = tokenizer
        self._options = options
        # A mark that no template touches stands for each special token a caller spelled; once the template
        # has run, what is still spelled out was written by the template itself, and gets its guarded name.
        nonce = secrets.token_hex(8) if spelled else ""
        marks = {token: f"\ue000{nonce}{index}\ue001" for index, token in enumerate(spelled)}
        self._messages: Sequence[Message] = _replace(messages, marks) if spelled else messages
        self._tools = _replace(tools, marks) if spelled and tools else tools
        self._tokenizer, self._names = tokenizer._guard() if spelled else (tokenizer._tokenizer, {})
        self._spelled = {mark: token for token, mark in marks.items()}

    def text(self, count: int | None = None, *, add_generation_prompt: bool = False) -> str:
        """The first `count` messages (default: all). RenderError if the template refuses them."""
        return self._finish(self._render(count, add_generation_prompt, self._owner._environment))

    def tagged(self, count: int | None = None) -> list[tuple[int, int]]:
        """Where in `text(count)` the template's generation tags stand: [start, end) in characters. Empty
        where it has none.
        """
        marked = self._finish(self._render(count, False, self._owner._marking))
        if _TAG_BEGIN not in marked:
            return []
        pieces = re.split(f"([{_TAG_BEGIN}{_TAG_END}])", marked)
        if "".join(pieces[::2]) != self.text(count):
            raise RenderError("a message holds U+E002 or U+E003, which mark the assistant's text here")
        spans: list[tuple[int, int]] = []
        starts: list[int] = []
        position = 0
        for text, mark in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
            position += len(text)
            if mark == _TAG_BEGIN:
                starts.append(position)
            elif mark:
                spans.append((starts.pop(), position))
        return spans

    def ids(self, text: str) -> list[int]:
        """Token ids [n] of a piece of these texts."""
        return self._owner._ids(self._tokenizer, text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens by the names they have in these texts."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _render(self, count: int | None, add_generation_prompt: bool, environment: Any) -> str:
        template = self._owner._template(bool(self._tools), environment)
        messages = self._messages if count is None else self._messages[:count]
        return self._owner._fill(template, messages, self._tools, add_generation_prompt, self._options)

    def _finish(self, text: str) -> str:
        return _replace_all(_replace_all(text, self._names), self._spelled) if self._spelled else text


def _output(text: str, line: int) -> jinja2.nodes.Output:
    return jinja2.nodes.Output([jinja2.nodes.TemplateData(text)], lineno=line)


def _load(source: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_str(source.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    value = json.loads(files[name]) if name in files else {}
    return value if isinstance(value, dict) else {}


def _templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a model's only one is `default`."""
    if TEMPLATE_FILE in files:
        return {"default": files[TEMPLATE_FILE].decode()}
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {str(name): str(text) for name, text in value.items()}
    return {str(item["name"]): str(item["template"]) for item in value or ()}


def _environment(generation_tag: type[jinja2.ext.Extension]) -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation_tag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Iterable):
        for item in value:
            yield from _strings(item)


def _replace(value: Any, table: Mapping[str, str]) -> Any:
    """`value` with the table's texts replaced in every string within it, keys included."""
    if isinstance(value, str):
        return _replace_all(value, table)
    if isinstance(value, Mapping):
        return {_replace(key, table): _replace(item, table) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace(item, table) for item in value]
    return value


def _replace_all(text: str, table: Mapping[str, str]) -> str:
    for old, new in table.items():
        text = text.replace(old, new)
    return text


def _rename(tokenizer: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """tokenizer.json with special tokens renamed in the added tokens and in the model's vocabulary."""
    for token in tokenizer.get("added_tokens", ()):
        token["content"] = names.get(token["content"], token["content"])
    model = tokenizer["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    # It names special tokens too, and is not used: nothing is added around what is encoded here.
    tokenizer["post_processor"] = None
    return tokenizer
