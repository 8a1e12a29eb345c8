"""The retry data is what the descriptors say, and marks nothing that is unsafe to repeat."""

import json
from importlib.resources import files

from opentinkerapi.runtime import retries


def test_data_is_fresh() -> None:
    wanted = retries.derive(retries.all_services())
    stored = (files("opentinkerapi.runtime") / "retries.json").read_text()
    assert stored == wanted, "run: python -m opentinkerapi.runtime.retries"


def test_only_unavailable_is_retried() -> None:
    config = json.loads(retries.service_config())["methodConfig"]
    assert [entry["retryPolicy"]["retryableStatusCodes"] for entry in config] == [["UNAVAILABLE"]]


def test_reads_and_identified_requests_are_repeatable() -> None:
    methods = {method.full_name: method for service in retries.all_services() for method in service.methods}
    prefix = "opentinkerapi."
    assert retries.repeatable(methods[prefix + "scheduler.v1.SchedulerService.GetJob"])
    assert retries.repeatable(methods[prefix + "scheduler.v1.SchedulerService.CreateJob"])
    assert retries.repeatable(methods[prefix + "trainer.v1.TrainerService.OptimStep"])
    assert not retries.repeatable(methods[prefix + "trainer.v1.TrainerService.ForwardBackward"])
