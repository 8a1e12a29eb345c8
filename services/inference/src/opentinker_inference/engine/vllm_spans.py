"""Which weights sampled which token of a vLLM completion, in merged serving.

vLLM stamps every step with the label of the weights that it ran under; the label here is the weights' key.
A job that may not continue must come out with one label: if it did not, its tokens are of weights that nobody
asked for, and it fails rather than be trained on.
"""

from collections.abc import Sequence
from typing import Any

import structlog

from opentinker_inference.domain.sampling import SampleJob
from opentinker_inference.domain.versions import VersionSpan, policy_of, version_of
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

_BASE = "base"


def label_of(key: str) -> str:
    """What vLLM is told the weights are."""
    return key or _BASE


def may_run(job: SampleJob, resident: str) -> bool:
    """Whether a job can be sampled under the resident weights: it names them, or goes on under them."""
    if job.weights == resident:
        return True
    return job.may_continue and policy_of(job.weights) == policy_of(resident) != ""


def version_spans(job: SampleJob, labelled: Sequence[Any]) -> tuple[VersionSpan, ...]:
    """Spans of a job's completion out of vLLM's; () where all of it is of the weights that the job names."""
    labels = {span.version for span in labelled}
    if labels <= {label_of(job.weights)}:
        return ()
    if not job.may_continue:
        log.error("weights changed under a request", request_id=job.request_id, labels=sorted(labels))
        raise ServiceError(Reason.INTERNAL)
    return tuple(VersionSpan(span.start, span.end, version_of(span.version)) for span in labelled)
