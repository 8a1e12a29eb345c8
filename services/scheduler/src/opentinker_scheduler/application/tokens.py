"""Job tokens: what a job's client shows to trainer, inference and env_host, and how long it may."""

from datetime import timedelta

from opentinker_kit.clock import Clock
from opentinker_kit.job_tokens import EVERYWHERE, JobClaims, TokenSigner
from opentinker_scheduler.domain.model import Job


class JobTokens:
    """Makes tokens. One lasts as long as the lease that its job has from now on; renewing gives the next."""

    def __init__(self, signer: TokenSigner, clock: Clock) -> None:
        self._signer = signer
        self._clock = clock

    def prepare(self) -> None:
        """Make the key, in any thread: the first token need not wait for it then."""
        self._signer.prepare()

    @property
    def public_keys(self) -> dict[str, bytes]:
        """What tokens are checked with, by id."""
        return {self._signer.key_id: self._signer.public_key}

    def issue(self, job: Job, audience: tuple[str, ...] = EVERYWHERE) -> str:
        """The token of a job under its attempt."""
        expires = self._clock.now() + timedelta(seconds=job.lease_ttl_s)
        claims = JobClaims(job.name, job.project, job.attempt, audience, expires.timestamp())
        return self._signer.sign(claims)
