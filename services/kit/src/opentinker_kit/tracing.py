"""Traces of a server, as its settings say."""

from opentinker_kit.settings import ServerSettings
from opentinkerapi.runtime import tracing


def configure_tracing(settings: ServerSettings, service: str) -> None:
    """Send the spans of this process to where the settings say; off by default."""
    tracing.configure(service, endpoint=settings.traces_endpoint, file=settings.traces_file)
