"""From rows of a data set to rows of tokens, with a count of everything that became of them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from opentinker.errors import InvalidArgument, OpenTinkerError, invalid
from opentinker.sampling.placing import check_takes_images, place_images
from opentinker.sampling.prompt import PlacedImage
from opentinker.supervised.data import Chat, Row
from opentinker.supervised.masks import Encoded, encode_chat, encode_completion
from opentinker.supervised.masks import Tokenizer as TextTokenizer
from opentinker.training.samples import TrainSample
from opentinkerapi.runtime.images import ImageSettings


class Tokenizer(TextTokenizer, Protocol):
    """What is needed of a tokenizer; `opentinkerapi.runtime.render.ChatTokenizer` has it."""

    @property
    def images(self) -> ImageSettings | None: ...


TrainOn = Literal["all", "last"]
RewrittenHistory = Literal["refuse", "split"]
TooLong = Literal["refuse", "drop"]


@dataclass(frozen=True, slots=True)
class Encoding:
    """How rows become tokens.

    `train_on`: every assistant turn of a conversation, or its last; messages with `train` or `weight` of
    their own decide for themselves. `rewritten_history`: what becomes of a conversation whose template writes
    earlier turns differently once others follow. `max_tokens`: the longest row; `too_long`: whether a longer
    one is an error or left out and counted. Rows are never cut.
    """

    max_tokens: int
    train_on: TrainOn = "all"
    rewritten_history: RewrittenHistory = "refuse"
    too_long: TooLong = "refuse"

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise invalid("max_tokens", f"must be at least 2, not {self.max_tokens}")
        check_choices(self.train_on, self.rewritten_history, self.too_long)


def check_choices(train_on: str, rewritten_history: str, too_long: str) -> None:
    """InvalidArgument for a word that is none of those allowed."""
    for name, value, allowed in (
        ("train_on", train_on, get_args(TrainOn)),
        ("rewritten_history", rewritten_history, get_args(RewrittenHistory)),
        ("too_long", too_long, get_args(TooLong)),
    ):
        if value not in allowed:
            raise invalid(name, f"must be one of {', '.join(map(repr, allowed))}, not {value!r}")


@dataclass(frozen=True, slots=True)
class Example:
    """One row of n tokens for the trainer: ids [n] int32, weights [n] float32 (0: context); images at their
    places.
    """

    name: str
    token_ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    images: tuple[PlacedImage, ...] = ()

    @property
    def loss_tokens(self) -> int:
        """Tokens that are trained on."""
        return int(np.count_nonzero(self.weights))

    def sample(self) -> TrainSample:
        """As the trainer takes it."""
        plain = bool(np.all((self.weights == 0) | (self.weights == 1)))
        return TrainSample(
            token_ids=self.token_ids.tolist(),
            loss_mask=(self.weights != 0).astype(int).tolist(),
            weights=None if plain else self.weights,
            sample_id=self.name,
            images=self.images,
        )


@dataclass(frozen=True, slots=True)
class Examples:
    """Encoded rows, in the order of the data set, and what became of the rows."""

    items: Sequence[Example]
    rows: int
    """Rows of the data set."""
    split: int
    """Rows that became several, for their template rewrites history."""
    dropped: int
    """Encoded rows left out because they are longer than allowed."""
    longest: int
    """Tokens of the longest row kept."""

    def __len__(self) -> int:
        return len(self.items)

    @property
    def tokens(self) -> int:
        """Tokens of one epoch."""
        return sum(len(item.token_ids) for item in self.items)

    @property
    def loss_tokens(self) -> int:
        """Of these, those trained on."""
        return sum(item.loss_tokens for item in self.items)

    def metrics(self, prefix: str) -> dict[str, float]:
        """All counts, under names that begin with `prefix`."""
        counts = {
            "rows": self.rows,
            "examples": len(self.items),
            "split": self.split,
            "dropped_too_long": self.dropped,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            "longest": self.longest,
        }
        return {f"{prefix}/{name}": float(value) for name, value in counts.items()}

    @property
    def digest(self) -> str:
        """Changes with any token, weight or image, and with their order."""
        digest = hashlib.sha256()
        for item in self.items:
            digest.update(len(item.token_ids).to_bytes(8, "little"))
            digest.update(item.token_ids.astype("<i4").tobytes())
            digest.update(item.weights.astype("<f4").tobytes())
            for placed in item.images:
                digest.update(hashlib.sha256(placed.image.data).digest())
        return digest.hexdigest()


def encode(rows: Sequence[Row], tokenizer: Tokenizer, how: Encoding, name: str = "data") -> Examples:
    """All rows as examples. Errors name the row: InvalidArgument, TemplateProblem."""
    items: list[Example] = []
    split = dropped = 0
    for index, row in enumerate(rows):
        field = f"{name}[{index}]"
        parts = _encode_row(row, tokenizer, how, field)
        split += len(parts) > 1
        for number, part in enumerate(parts):
            if len(part.token_ids) > how.max_tokens:
                if how.too_long == "refuse":
                    raise invalid(
                        field,
                        f"has {len(part.token_ids)} tokens and max_tokens is {how.max_tokens}: shorten it, "
                        f'raise max_tokens, or leave such rows out with too_long="drop"',
                    )
                dropped += 1
                continue
            items.append(
                Example(
                    f"{field}/{number}" if len(parts) > 1 else field,
                    np.asarray(part.token_ids, dtype=np.int32),
                    np.asarray(part.weights, dtype=np.float32),
                    part.images,
                )
            )
    if not items:
        raise invalid(name, f"every row has more than max_tokens={how.max_tokens} tokens")
    longest = max(len(item.token_ids) for item in items)
    return Examples(tuple(items), len(rows), split, dropped, longest)


@dataclass(frozen=True, slots=True)
class _Placed:
    """An encoded row with a placeholder at every place of its images."""

    token_ids: Sequence[int]
    weights: Sequence[float]
    images: tuple[PlacedImage, ...] = ()


def _encode_row(row: Row, tokenizer: Tokenizer, how: Encoding, field: str) -> list[_Placed]:
    # Here: a tokenizer has loaded it by now, and importing this package must not.
    from opentinkerapi.runtime.render import RenderError

    try:
        if isinstance(row, Chat):
            factors = row.factors(how.train_on)
            if not any(factors):
                raise invalid(field, "no message of it is trained on")
            if row.images:
                check_takes_images(tokenizer, "it", field)
            told = encode_chat(tokenizer, row.messages, row.tools, factors, how.rewritten_history)
            parts = [_place(part, row, tokenizer, field) for part in told]
        else:
            plain = encode_completion(tokenizer, row.prompt, row.completion, row.weight)
            parts = [_Placed(plain.token_ids, plain.weights)]
    except RenderError as error:
        raise invalid(field, str(error)) from error
    except InvalidArgument as error:
        raise _at(error, field) from error
    if any(part.weights[0] for part in parts):
        raise invalid(field, "its first token would be trained on, and there is nothing to predict it from")
    return parts


def _place(part: Encoded, row: Chat, tokenizer: Tokenizer, field: str) -> _Placed:
    """With the images of the messages that it holds."""
    images = [image for each in row.images[: part.messages] for image in each]
    if not images:
        return _Placed(part.token_ids, part.weights)
    prompt = place_images(part.token_ids, images, tokenizer, field)
    counts = {image.start: image.token_count for image in prompt.images}
    weights: list[float] = []
    for weight in part.weights:
        weights += [weight] * counts.get(len(weights), 1)
    return _Placed(prompt.ids, weights, prompt.images)


def _at(error: OpenTinkerError, field: str) -> OpenTinkerError:
    """The same error with the row in front."""
    if error.message.startswith(field):
        return error
    return type(error)(f"{field}: {error.message}", reason=error.reason, field=field)
