"""Job tokens: who sends one acts for the job that it names, at the kinds of servers that it names.

The scheduler signs them with an Ed25519 key (`TokenSigner`); trainer, inference and env_host know its public
half and check them without asking anybody (`TokenVerifier`). A token says which job, of which project, under
which attempt, where it may be used and until when: `ot2.<claims, JSON>.<signature>`, both in URL-safe base64.
"""

import base64
import binascii
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

TRAINER, INFERENCE, ENV_HOST = "trainer", "inference", "env_host"
"""Audiences: the kinds of servers that tokens are for."""
EVERYWHERE = (TRAINER, INFERENCE, ENV_HOST)

LEEWAY_S = 30.0
"""How far clocks of machines may be apart."""
_PREFIX = "ot2"
_MAX_LENGTH = 4096
_REMEMBERED = 4096
"""Tokens whose signature is not checked again; each use looks at their time."""
_LOOK_AGAIN_S = 5.0
"""Between two looks for keys on behalf of tokens that name an unknown one: anybody can make those up."""

FetchKeys = Callable[[], Awaitable[Mapping[str, bytes]]]
"""The public keys by id. ServiceError where nobody can be asked."""


@dataclass(frozen=True, slots=True)
class JobClaims:
    """What a token says."""

    job: str
    """`jobs/{job}`."""
    project: str
    attempt: int
    audience: tuple[str, ...]
    expires: float
    """Seconds since 1970."""


class TokenSigner:
    """Signs with a key that is made from a secret, so that the same secret gives the same key."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def prepare(self) -> None:
        """Do once, and beside other things, what takes a while: load the library, make the key."""
        _ = self.public_key

    @cached_property
    def _key(self) -> Any:
        from Crypto.Signature import eddsa  # here: who starts does not wait for it

        seed = hashlib.sha256(b"opentinker job tokens\0" + self._secret.encode()).digest()
        return eddsa.import_private_key(seed)

    @cached_property
    def public_key(self) -> bytes:
        """32 bytes."""
        return bytes(self._key.public_key().export_key(format="raw"))

    @cached_property
    def key_id(self) -> str:
        """What tokens name the key by."""
        return hashlib.sha256(self.public_key).hexdigest()[:16]

    def sign(self, claims: JobClaims) -> str:
        """The token that says this."""
        body = json.dumps(
            {
                "kid": self.key_id,
                "job": claims.job,
                "prj": claims.project,
                "att": claims.attempt,
                "aud": list(claims.audience),
                "exp": round(claims.expires, 3),
            },
            separators=(",", ":"),
        )
        from Crypto.Signature import eddsa

        signed = f"{_PREFIX}.{_encode(body.encode())}"
        proof = bytes(eddsa.new(self._key, "rfc8032").sign(signed.encode()))
        return f"{signed}.{_encode(proof)}"


class TokenVerifier:
    """Checks tokens for one kind of server. Public keys are asked for when a token names an unknown one."""

    def __init__(self, audience: str, fetch: FetchKeys, clock: Clock) -> None:
        self._audience = audience
        self._fetch = fetch
        self._clock = clock
        self._keys: Mapping[str, bytes] = {}
        self._looked = float("-inf")
        self._known: OrderedDict[str, JobClaims] = OrderedDict()

    async def verify(self, token: str) -> JobClaims:
        """What a token says. STALE_ATTEMPT for one whose lease is over, so that its holder renews it;
        UNAUTHENTICATED, saying why, for any other that is not valid here.
        """
        claims = self._known.get(token)
        if claims is None:
            claims = await self._read(token)
            self._known[token] = claims
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        if self._clock.now().timestamp() > claims.expires + LEEWAY_S:
            self._known.pop(token, None)
            text = f"the job token is as old as its lease; RenewJobLease of {claims.job} gives a new one"
            raise ServiceError(Reason.STALE_ATTEMPT, text, field="job_token")
        if self._audience not in claims.audience:
            raise _refused(f"for {', '.join(claims.audience)}, and this is {self._audience}")
        return claims

    async def _read(self, token: str) -> JobClaims:
        signed, _, signature = token.rpartition(".")
        prefix, _, body = signed.partition(".")
        if prefix != _PREFIX or len(token) > _MAX_LENGTH:
            raise _refused("no job token of this version")
        try:
            values = json.loads(_decode(body))
            key_id = str(values["kid"])
            claims = JobClaims(
                job=str(values["job"]),
                project=str(values["prj"]),
                attempt=int(values["att"]),
                audience=tuple(str(item) for item in values["aud"]),
                expires=float(values["exp"]),
            )
            proof = _decode(signature)
        except (ValueError, KeyError, TypeError, binascii.Error):
            raise _refused("malformed") from None
        if not _is_signed(await self._key(key_id), signed.encode(), proof):
            raise _refused("not one that this cluster made")
        return claims

    async def _key(self, key_id: str) -> bytes | None:
        now = self._clock.monotonic()
        if key_id not in self._keys and (not self._keys or now - self._looked > _LOOK_AGAIN_S):
            keys = await self._fetch()
            self._keys, self._looked = keys, now
        return self._keys.get(key_id)


def _is_signed(public_key: bytes | None, data: bytes, signature: bytes) -> bool:
    if public_key is None:
        return False
    from Crypto.Signature import eddsa  # here: a server without tokens to check does not wait for it

    try:
        eddsa.new(eddsa.import_public_key(public_key), "rfc8032").verify(data, signature)
    except ValueError:
        return False
    return True


def _refused(why: str) -> ServiceError:
    return ServiceError(Reason.UNAUTHENTICATED, f"the job token is {why}", field="job_token")


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
