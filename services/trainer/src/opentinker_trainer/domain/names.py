"""Resource names, checked before a path or an object key is built of them."""

import hashlib
import re

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

_POLICY = re.compile(r"policies/[a-z0-9][a-z0-9-]{0,62}")
_CHECKPOINT = re.compile(r"(policies/[a-z0-9][a-z0-9-]{0,62})/checkpoints/[a-z0-9][a-z0-9-]{0,62}")


def check_policy(name: str) -> str:
    """The name of a policy. POLICY_NOT_FOUND if it cannot be one."""
    if not _POLICY.fullmatch(name):
        raise ServiceError(Reason.POLICY_NOT_FOUND, f"{name!r} is no policy name", field="policy")
    return name


def checkpoint_policy(name: str) -> str:
    """The policy that a checkpoint's name says it is of. CHECKPOINT_NOT_FOUND if it cannot be one."""
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        text = (
            f"{name!r} is no checkpoint name; they look like policies/{{policy}}/checkpoints/{{checkpoint}}"
        )
        raise ServiceError(Reason.CHECKPOINT_NOT_FOUND, text, field="checkpoint")
    return match[1]


def policy_name(job: str, request_id: str) -> str:
    """The name of the policy that a request makes: the same request, the same policy."""
    return f"policies/p{hashlib.sha256(f'{job}|{request_id}'.encode()).hexdigest()[:20]}"
