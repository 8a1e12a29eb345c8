"""Rows for loops of one's own: conversations to train samples, with exact masks."""

from opentinker.environments.rows import Source
from opentinker.supervised.data import read
from opentinker.supervised.encoding import Encoding, RewrittenHistory, Tokenizer, TooLong, TrainOn, encode
from opentinker.training.samples import TrainSamples


def supervised_samples(
    data: Source,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    train_on: TrainOn = "all",
    rewritten_history: RewrittenHistory = "refuse",
    too_long: TooLong = "refuse",
) -> TrainSamples:
    """Rows as `sft()` takes them, in their order, as train samples for `policy.forward` and
    `policy.forward_backward`; what became of the rows is in `.metrics`.

    `tokenizer` comes from `await policy.tokenizer()`.
    """
    how = Encoding(max_tokens, train_on, rewritten_history, too_long)
    examples = encode(read(data, "data"), tokenizer, how, "data")
    return TrainSamples([item.sample() for item in examples.items], examples.metrics("data"))
