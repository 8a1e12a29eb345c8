"""Who may ask a server for anything: H-list faults of releases that free what is another's."""

import pytest

from opentinker_inference.domain.leases import Leases
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason


def refused(leases: Leases, attempt: int) -> bool:
    try:
        leases.check(attempt)
    except ServiceError as error:
        return error.reason is Reason.STALE_ATTEMPT
    return False


def test_a_late_release_frees_only_its_own() -> None:
    leases = Leases()
    assert not refused(leases, 3)  # a server that no scheduler knows
    leases.take("assignments/1", "jobs/a", 1)
    leases.take("assignments/2", "jobs/a", 2)  # the job came back before its first attempt was released
    assert refused(leases, 1)
    leases.release("assignments/1")
    assert refused(leases, 1)
    assert not refused(leases, 2)
    assert not refused(leases, 0)


def test_one_of_several_slots_of_a_job() -> None:
    leases = Leases()
    leases.take("assignments/1", "jobs/a", 2)
    leases.take("assignments/2", "jobs/a", 2)
    leases.take("assignments/3", "jobs/b", 7)
    leases.take("assignments/3", "jobs/b", 7)  # said again after a reconnect
    leases.release("assignments/1")
    leases.release("assignments/1")
    assert not refused(leases, 2)
    assert not refused(leases, 7)
    leases.release("assignments/2")
    assert refused(leases, 2)
    with pytest.raises(ServiceError, match="attempt 2 is over"):
        leases.check(2)


def test_who_calls_for_a_job_needs_a_slot_of_that_job() -> None:
    leases = Leases()
    leases.take("assignments/1", "jobs/a", 2)
    leases.take("assignments/2", "jobs/b", 7)
    leases.check(2, "jobs/a", 2)
    leases.check(0, "jobs/a", 5)  # the job has a newer slot elsewhere
    for attempt, job, token in (
        (7, "jobs/a", 7),
        (2, "jobs/b", 7),
        (2, "jobs/c", 2),
        (0, "jobs/c", 0),
        (2, "jobs/a", 1),
    ):
        with pytest.raises(ServiceError) as caught:
            leases.check(attempt, job, token)
        assert caught.value.reason is Reason.STALE_ATTEMPT
