"""Counts of tokens by job."""

from opentinker_kit.metering import TokenMeter, Tokens


def test_what_changed_is_said_once_and_everything_where_it_is_asked_for() -> None:
    meter = TokenMeter()
    meter.trained("jobs/a", 5)
    meter.sampled("jobs/b", 2)
    meter.sampled("jobs/a", 1)
    meter.trained("", 100)
    assert dict(meter.changed()) == {"jobs/a": Tokens(5, 1), "jobs/b": Tokens(0, 2)}
    assert not dict(meter.changed())
    meter.trained("jobs/a", 3)
    assert dict(meter.changed()) == {"jobs/a": Tokens(8, 1)}
    assert dict(meter.changed(everything=True)) == {"jobs/a": Tokens(8, 1), "jobs/b": Tokens(0, 2)}
