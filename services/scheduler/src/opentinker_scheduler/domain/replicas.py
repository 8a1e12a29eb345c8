"""What a job holds of the slots that it asked for, and whether that is enough to work with.

The slots of an inference spec are replicas, each on a server of its own: any can do what another does. So
a job that runs goes on while one of each spec answers, and what it lost is a spare that comes back when
there is room. Trainer slots have no replicas: every one is needed.
"""

from collections.abc import Collection, Sequence

from opentinker_scheduler.domain.model import Job, Role

Place = tuple[int, int]
"""Index of a slot spec, and which of its `count`."""


def missing(job: Job, held: Collection[Place]) -> list[Place]:
    """What a job asks for and does not hold."""
    have = set(held)
    wanted = [(index, ordinal) for index, spec in enumerate(job.slots) for ordinal in range(spec.count)]
    return [place for place in wanted if place not in have]


def suffices(job: Job, answering: Collection[Place]) -> bool:
    """Whether a job can work with what answers: every trainer slot, one replica of each inference spec."""
    have = set(answering)
    return all(
        (any if spec.role is Role.INFERENCE else all)(
            (index, ordinal) in have for ordinal in range(spec.count)
        )
        for index, spec in enumerate(job.slots)
    )


def urgency(job: Job, held: Collection[Place]) -> tuple[Sequence[Place], Sequence[Place]]:
    """What is missing, apart: what the job cannot work without, and spare replicas."""
    lacking = missing(job, held)
    served = {index for index, _ in held}
    needed: list[Place] = []
    for place in lacking:
        index = place[0]
        if job.slots[index].role is not Role.INFERENCE:
            needed.append(place)
        elif index not in served:
            needed.append(place)
            served.add(index)
    return needed, [place for place in lacking if place not in needed]
