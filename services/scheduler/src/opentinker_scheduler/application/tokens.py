"""Job tokens: what trainer, inference and env_host will check once accounts come. Until then an opaque text
that only this cluster can make, bound to a job and an attempt."""

import hashlib
import hmac

_PREFIX = "ot1"


class JobTokens:
    """Makes tokens with a key that the cluster's services share."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def issue(self, job_id: str, attempt: int) -> str:
        """The token of a job under an attempt."""
        body = f"{_PREFIX}.{job_id}.{attempt}"
        return f"{body}.{self._sign(body)}"

    def valid(self, token: str) -> bool:
        """Whether this cluster made the token."""
        body, _, signature = token.rpartition(".")
        return body.startswith(f"{_PREFIX}.") and hmac.compare_digest(signature, self._sign(body))

    def _sign(self, body: str) -> str:
        return hmac.new(self._key, f"job-token:{body}".encode(), hashlib.sha256).hexdigest()
