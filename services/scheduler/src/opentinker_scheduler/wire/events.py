"""Facts as events."""

from datetime import datetime

from opentinker_scheduler.domain.records import Fact
from opentinkerapi.events.v1 import event_pb2

SOURCE = "scheduler"


def event_of(fact: Fact, event_id: str, occur_time: datetime) -> event_pb2.Event:
    """The envelope of a fact. ValueError for a kind that is not known."""
    event = event_pb2.Event(id=event_id, source=SOURCE)
    event.occur_time.FromDatetime(occur_time)
    detail = fact.detail
    match fact.kind:
        case "job":
            event.job_changed.job = fact.subject
            event.job_changed.state = str(detail["state"])
            event.job_changed.reason = str(detail.get("reason", ""))
            event.job_changed.attempt = int(detail.get("attempt", 0))
        case "server_registered":
            event.server_registered.server = fact.subject
            event.server_registered.address = str(detail.get("address", ""))
        case "server_lost":
            event.server_lost.server = fact.subject
            event.server_lost.reason = str(detail.get("reason", ""))
        case "weights_published":
            event.weights_published.policy = fact.subject
            event.weights_published.version = int(detail.get("version", 0))
            event.weights_published.sha256 = str(detail.get("sha256", ""))
            event.weights_published.manifest_key = str(detail.get("manifest_key", ""))
        case "checkpoint_saved":
            event.checkpoint_saved.checkpoint = fact.subject
        case "metrics_step":
            event.metrics_step.run = fact.subject
            event.metrics_step.step = int(detail.get("step", 0))
            event.metrics_step.values.update(fact.values)
        case other:
            raise ValueError(f"{other!r} is no fact")
    return event
