"""GRPO raises the share of goals that are reached on held-out phones by at least 0.30, with a 95 % interval
above 0, for each of three seeds.

SmolLM2-135M-Instruct turns switches and alarms on and off within seven actions, on phones of three switches
and three alarms (examples/phone.py), warmed up by our own SFT on 160 demonstrations, six in ten of which
fumble.
"""

from examples.phone import Owner, PhoneUse, fumbler
from scripts.evidence_cases import Progress
from scripts.use_cases import UseCase, learned, measure

CASE = UseCase(
    name="phone",
    env=PhoneUse,
    options={"kinds": ["switch", "alarm"], "turns": 7, "items": 3},
    scripts=(Owner, lambda: fumbler),
    good=0.4,
    demonstrations=160,
    steps=16,
    groups=4,
    max_tokens=12,
)


def run(progress: Progress) -> dict[str, object]:
    return learned(measure(CASE, progress))
