"""What an inference server counts: requests, tokens sampled and scored."""

from opentinker_inference.domain.service import InferenceDomain
from opentinker_kit.metrics import Labels, Metrics


def show(metrics: Metrics, domain: InferenceDomain) -> None:
    """Have what the domain counts shown."""
    tally = domain.tally

    def tokens() -> dict[Labels, float]:
        return {
            ("sampled",): tally.sampled_tokens,
            ("scored",): tally.scored_tokens,
            ("prompt",): tally.prompt_tokens,
            ("prompt_cached",): tally.cached_prompt_tokens,
        }

    def requests() -> dict[Labels, float]:
        return {(outcome,): number for outcome, number in tally.requests.items()}

    def open_requests() -> dict[Labels, float]:
        waiting = domain.queued()
        return {("running",): max(0, domain.book.running - waiting), ("waiting",): waiting}

    metrics.read("opentinker_inference_tokens", "Tokens of ended requests.", tokens, ("kind",), grows=True)
    metrics.read(
        "opentinker_inference_requests_ended",
        "Sample requests, by outcome.",
        requests,
        ("reason",),
        grows=True,
    )
    metrics.read(
        "opentinker_inference_requests",
        "Sample requests that have not ended; those that wait, wait for their weights.",
        open_requests,
        ("state",),
    )
