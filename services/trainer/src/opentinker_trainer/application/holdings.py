"""Which policies this server holds, and who may change them."""

from collections.abc import Callable, Iterator

from opentinker_kit.errors import ServiceError
from opentinker_trainer.application.held import HeldPolicy, Signal
from opentinker_trainer.domain.names import check_policy
from opentinkerapi.runtime.reasons import Reason


class Holdings:
    """The held policies, and the attempts under which jobs hold slots here.

    Without a scheduler (`attempts` is None) every attempt is fine.
    """

    def __init__(self, *, managed: bool, holds_lease: Callable[[], bool]) -> None:
        """`managed`: a scheduler gives jobs their attempts."""
        self._policies: dict[str, HeldPolicy] = {}
        self._attempts: dict[str, int] | None = {} if managed else None
        self._holds_lease = holds_lease
        self.work = Signal()
        """Set off when the engine may have something to do."""
        self.draining = False

    def __iter__(self) -> Iterator[HeldPolicy]:
        return iter(list(self._policies.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._policies

    @property
    def managed(self) -> bool:
        """Whether a scheduler gives out the slots."""
        return self._attempts is not None

    def add(self, policy: HeldPolicy) -> None:
        self._policies[policy.name] = policy
        self.work.notify()

    def remove(self, policy: HeldPolicy, why: ServiceError) -> None:
        """Let go of a policy; whoever waits for it is told why."""
        if self._policies.get(policy.name) is policy:
            del self._policies[policy.name]
        policy.close(why)

    def get(self, name: str) -> HeldPolicy:
        """POLICY_NOT_FOUND if this server does not hold it."""
        policy = self._policies.get(check_policy(name))
        if policy is None:
            raise not_held(name)
        return policy

    def assign(self, job: str, attempt: int) -> None:
        """A job has a slot here, under this attempt."""
        if self._attempts is not None:
            self._attempts[job] = attempt

    def unassign(self, job: str) -> None:
        """A job has no slot here any more."""
        if self._attempts is not None:
            self._attempts.pop(job, None)

    def attempt_of(self, job: str) -> int:
        """Attempt under which a job holds its slot; 0 if it has none."""
        return 0 if self._attempts is None else self._attempts.get(job, 0)

    def drain(self) -> None:
        """Take nothing in any more, and tell whoever waits."""
        self.draining = True
        for policy in self:
            policy.changed.notify()

    def check_open(self) -> None:
        """DRAINING if the server is stopping."""
        if self.draining:
            raise ServiceError(Reason.DRAINING, retry_after_s=1.0)

    def check_attempt(self, job: str, attempt: int) -> None:
        """STALE_ATTEMPT unless the caller's endpoint is this server, now; JOB_NOT_FOUND for others' jobs."""
        self.check_open()
        if self._attempts is None:
            return
        held = self._attempts.get(job)
        if held is None:
            text = f"{job or 'no job'} has no slot on this server; resolve its endpoints with RenewJobLease"
            raise ServiceError(Reason.JOB_NOT_FOUND, text, field="job")
        if attempt != held:
            text = f"attempt {attempt} of {job} is not the one that holds the slot, {held}"
            raise ServiceError(Reason.STALE_ATTEMPT, text, metadata={"attempt": held})
        if not self._holds_lease():
            raise ServiceError(Reason.STALE_ATTEMPT, "the lease of this server is over; resolve it anew")

    def check_token(self, job: str, attempt: int) -> None:
        """STALE_ATTEMPT for a token that was made before the job was given the slot that it has here."""
        held = self.attempt_of(job)
        if attempt < held:
            text = f"the token is of attempt {attempt}; {job} holds its slot under {held}"
            raise ServiceError(Reason.STALE_ATTEMPT, text, field="job_token", metadata={"attempt": held})

    def may_run(self, policy: HeldPolicy) -> bool:
        """Whether the policy may be changed now, by this server's own clock."""
        return policy.gone is None and (self._attempts is None or self._holds_lease())


def not_held(name: str) -> ServiceError:
    """What is said of a policy that this server does not hold, or not for the caller."""
    return ServiceError(Reason.POLICY_NOT_FOUND, f"this server does not hold {name}")
