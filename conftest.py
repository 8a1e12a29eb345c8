"""Fixtures for every test: real servers on free ports, a tiny model (see opentinker_kit.testing)."""

pytest_plugins = ["opentinker_kit.testing.plugin"]
