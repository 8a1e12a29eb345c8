"""What temperature and a restricted support do to the logprob of a sampled token.

A sampler with top_p or top_k below all draws from a renormalized distribution. Its logprob under the full one
is too small by log(kept mass), and a ratio of the two is off by that factor though nothing has changed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from opentinker.errors import invalid
from opentinker.training.limits import above
from opentinker.training.rows import Flags, Floats


def logprob(logits: ArrayLike, token: int, *, temperature: float = 1.0) -> float:
    """log softmax(logits / temperature) of a token, from logits [V]."""
    return float(_log_softmax(logits, temperature)[token])


def kept(
    logits: ArrayLike, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None
) -> Flags:
    """[V] bool: which tokens may be sampled.

    top_k first, then the smallest set of the likeliest whose part of the mass that top_k left reaches top_p;
    at least one. Of equally likely tokens those with smaller ids come first.
    """
    if not 0 < top_p <= 1:
        raise invalid("top_p", f"must be in (0, 1], not {top_p}")
    if top_k is not None and top_k < 1:
        raise invalid("top_k", f"must be at least 1, not {top_k}")
    probabilities = np.exp(_log_softmax(logits, temperature))
    order = np.argsort(-probabilities, kind="stable")[:top_k]
    mass = np.cumsum(probabilities[order]) / probabilities[order].sum()
    count = int(np.searchsorted(mass, top_p)) + 1 if top_p < 1 else len(order)
    result = np.zeros(probabilities.shape, dtype=bool)
    result[order[:count]] = True
    return result


@dataclass(frozen=True, slots=True)
class Sampled:
    """`processed` is the logprob that the token was sampled with: `scaled` - log(`kept_mass`)."""

    scaled: float
    """Logprob at the temperature, of the full distribution."""
    kept_mass: float
    processed: float


def sampled(
    logits: ArrayLike,
    token: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
) -> Sampled:
    """The logprobs of a token from logits [V]. InvalidArgument if it is outside the support.

    exp(scaled - processed) = kept mass: the ratio between two policies that are the same, where one forgets
    the support.
    """
    scaled = _log_softmax(logits, temperature)
    flags = kept(logits, temperature=temperature, top_p=top_p, top_k=top_k)
    if not flags[token]:
        raise invalid("token", f"{token} cannot be sampled under top_p={top_p}, top_k={top_k}")
    mass = float(np.exp(scaled[flags]).sum())
    return Sampled(float(scaled[token]), mass, float(scaled[token]) - float(np.log(mass)))


def _log_softmax(logits: ArrayLike, temperature: float) -> Floats:
    above("temperature", temperature, 0.0)
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    shifted = scaled - scaled.max()
    result: Floats = shifted - np.log(np.exp(shifted).sum())
    return result
