"""Job tokens: what is signed is believed where it is for, until its time, and nothing else is."""

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from opentinker_kit.clock import ManualClock
from opentinker_kit.errors import ServiceError
from opentinker_kit.job_tokens import (
    ENV_HOST,
    INFERENCE,
    LEEWAY_S,
    TRAINER,
    JobClaims,
    TokenSigner,
    TokenVerifier,
)
from opentinkerapi.runtime.reasons import Reason

NOW = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
CLAIMS = JobClaims("jobs/j1", "p1", 3, (TRAINER, INFERENCE), NOW + 600)


class Keys:
    """What the scheduler says its keys are, and how often it was asked."""

    def __init__(self, *signers: TokenSigner) -> None:
        self.keys = {signer.key_id: signer.public_key for signer in signers}
        self.asked = 0

    async def fetch(self) -> Mapping[str, bytes]:
        self.asked += 1
        return self.keys


@pytest.fixture(scope="module")
def signer() -> TokenSigner:
    return TokenSigner("secret")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(datetime(2026, 1, 1, tzinfo=UTC))


async def refused(verifier: TokenVerifier, token: str) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await verifier.verify(token)
    return caught.value


async def test_what_was_signed_is_read_and_the_key_is_asked_for_once(
    signer: TokenSigner, clock: ManualClock
) -> None:
    keys = Keys(signer)
    verifier = TokenVerifier(TRAINER, keys.fetch, clock)
    for attempt in (3, 4):
        claims = replace(CLAIMS, attempt=attempt)
        assert await verifier.verify(signer.sign(claims)) == claims
    assert keys.asked == 1
    assert TokenSigner("secret").sign(CLAIMS) == signer.sign(CLAIMS)
    assert TokenSigner("other").key_id != signer.key_id


async def test_another_kind_of_server_refuses_it(signer: TokenSigner, clock: ManualClock) -> None:
    error = await refused(TokenVerifier(ENV_HOST, Keys(signer).fetch, clock), signer.sign(CLAIMS))
    assert error.reason is Reason.UNAUTHENTICATED
    assert "trainer, inference" in error.message


async def test_it_ends_with_its_lease(signer: TokenSigner, clock: ManualClock) -> None:
    verifier = TokenVerifier(TRAINER, Keys(signer).fetch, clock)
    token = signer.sign(CLAIMS)
    await verifier.verify(token)
    await clock.advance(600 + LEEWAY_S)
    await verifier.verify(token)
    await clock.advance(1)
    assert (await refused(verifier, token)).reason is Reason.STALE_ATTEMPT


@pytest.mark.parametrize(
    "spoil",
    [
        lambda token: "",
        lambda token: "ot1.j.1.signature",
        lambda token: token[:-2] + ("AA" if not token.endswith("AA") else "BB"),
        lambda token: token.rpartition(".")[0],
        lambda token: token + "!",
        lambda token: token.replace("ot2.", "ot2.e30", 1),
        lambda token: "ot2." + "A" * 5000,
        lambda token: _with_claims(token, prj="p2"),
        lambda token: _with_claims(token, exp=9e9),
        lambda token: _with_claims(token, kid="none"),
        lambda token: _with_claims(token, aud=None),
        lambda token: _with_claims(token, att="x"),
    ],
)
async def test_what_was_changed_is_not_believed(
    signer: TokenSigner, clock: ManualClock, spoil: object
) -> None:
    assert callable(spoil)
    verifier = TokenVerifier(TRAINER, Keys(signer).fetch, clock)
    error = await refused(verifier, spoil(signer.sign(CLAIMS)))
    assert error.reason is Reason.UNAUTHENTICATED
    assert error.violations[0][0] == "job_token"


def _with_claims(token: str, **changes: object) -> str:
    prefix, body, signature = token.split(".")
    values = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))) | changes
    changed = base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")
    return f"{prefix}.{changed}.{signature}"


async def test_another_clusters_token_is_refused_and_made_up_keys_are_not_asked_for_each_time(
    signer: TokenSigner, clock: ManualClock
) -> None:
    keys = Keys(signer)
    verifier = TokenVerifier(TRAINER, keys.fetch, clock)
    await verifier.verify(signer.sign(CLAIMS))
    for number in range(20):
        stranger = TokenSigner(f"stranger {number}")
        assert (await refused(verifier, stranger.sign(CLAIMS))).reason is Reason.UNAUTHENTICATED
    assert keys.asked == 1
    # A key that is new is found, a while later.
    newer = TokenSigner("newer")
    keys.keys[newer.key_id] = newer.public_key
    await clock.advance(10)
    assert await verifier.verify(newer.sign(CLAIMS)) == CLAIMS
