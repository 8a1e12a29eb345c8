"""GRPO raises the share of held-out customers that are served by the policy by at least 0.30, with a 95 %
interval above 0, for each of three seeds.

SmolLM2-135M-Instruct serves customers who want a refund or a cancellation and name their order, in a shop
that does not ask who they are (examples/customer_service.py), warmed up by our own SFT on 160 demonstrations:
four in ten by a good clerk, the others by one who says something polite and does nothing.
"""

from functools import partial

from examples.customer_service import Clerk, CustomerService, brusque
from scripts.evidence_cases import Progress
from scripts.use_cases import UseCase, learned, measure

CASE = UseCase(
    name="customer_service",
    env=CustomerService,
    options={"wishes": ["refund", "cancel"], "identify": False, "shy": 0.0, "turns": 5},
    scripts=(partial(Clerk, identify=False), lambda: brusque),
    good=0.4,
    demonstrations=160,
    steps=16,
    groups=4,
    max_tokens=36,
)


def run(progress: Progress) -> dict[str, object]:
    return learned(measure(CASE, progress))
