"""Which attempts of jobs may ask this server: what the scheduler assigned and has not released."""

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason


class Leases:
    """The slots held here. A job's slot under a newer attempt ends the older ones, whose release may come
    later than it.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, int]] = {}

    def take(self, assignment: str, job: str, attempt: int) -> None:
        """A job holds a slot here; said again after a reconnect."""
        self._held[assignment] = (job, attempt)

    def release(self, assignment: str) -> None:
        """It does no longer; one that is not held is released already."""
        self._held.pop(assignment, None)

    def check(self, attempt: int, job: str = "", token_attempt: int = 0) -> None:
        """STALE_ATTEMPT unless a job here holds its slot under `attempt` (0 comes from no scheduler).

        Where the call is made for a job it must be that one, with a token that was not made before the slot
        was given.
        """
        newest: dict[str, int] = {}
        for holder, held in self._held.values():
            newest[holder] = max(held, newest.get(holder, 0))
        if job and job not in newest:
            text = f"{job} has no slot on this server; renew its lease for its endpoints"
            raise ServiceError(Reason.STALE_ATTEMPT, text, field="job_token")
        if job and token_attempt < newest[job]:
            text = f"the token is of attempt {token_attempt}; {job} holds its slot under {newest[job]}"
            raise ServiceError(Reason.STALE_ATTEMPT, text, field="job_token")
        current = [newest[job]] if job else newest.values()
        if attempt and newest and attempt not in current:
            raise ServiceError(
                Reason.STALE_ATTEMPT,
                f"attempt {attempt} is over; renew the job's lease for its new endpoints",
                metadata={"attempt": attempt},
            )
