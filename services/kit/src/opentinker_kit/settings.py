"""What every server can be told, and from where: a JSON file (0600), then `OPENTINKER_<FIELD>`, then
defaults.

    python -m opentinker_scheduler --settings scheduler.json

Environment variables override the file. Secrets are never values here, only the names of 0600 files that hold
them, so that a settings object may be logged.
"""

import argparse
import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from opentinkerapi.runtime.tls import TlsFiles, read_files

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class S3Settings(BaseModel):
    """Where objects are kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str
    """`host:port`, without a scheme."""
    access_key: str
    secret_key_file: Path
    bucket: str = "opentinker"
    region: str = "us-east-1"
    secure: bool = False
    public_endpoint: str = ""
    """The address that presigned URLs name, `scheme://host:port`; by default `endpoint`."""

    def secret_key(self) -> str:
        return read_secret(self.secret_key_file)


class TlsSettings(BaseModel):
    """PEM files of a server; `client_ca_file` turns mutual TLS on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    certificate_file: Path
    key_file: Path
    client_ca_file: Path | None = None
    """Callers need a certificate that one of these authorities signed."""

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """The key, the certificate and the authorities of callers. ValueError if they are of no use."""
        fields = ("tls.client_ca_file", "tls.certificate_file", "tls.key_file")
        files = read_files(self.client_ca_file, self.certificate_file, self.key_file, fields=fields)
        assert files.key is not None
        assert files.chain is not None
        return files.key, files.chain, files.root


class PeerTlsSettings(BaseModel):
    """PEM files for the calls that a server makes to other servers, which are then made by TLS."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ca_file: Path | None = None
    """Who signed their certificates; by default the system's authorities."""
    certificate_file: Path | None = None
    """Shown to servers that ask for one; by default the server's own (`tls`)."""
    key_file: Path | None = None
    server_name: str = ""
    """The name that their certificates are checked for, instead of the host that is called."""


class TransportSettings(BaseSettings):
    """How a server is called, and how it calls others."""

    model_config = SettingsConfigDict(env_prefix="OPENTINKER_", env_nested_delimiter="__", extra="ignore")

    tls: TlsSettings | None = None
    """Without it the server speaks no TLS."""
    peer_tls: PeerTlsSettings | None = None
    """Without it servers whose address does not begin with `grpcs://` are called without TLS."""

    def peer_files(self) -> TlsFiles | None:
        """What this server shows and trusts when it calls others. ValueError if a file is of no use."""
        if self.peer_tls is None:
            return None
        shown: TlsSettings | PeerTlsSettings | None = self.peer_tls
        if self.peer_tls.certificate_file is None and self.peer_tls.key_file is None:
            shown = self.tls
        return read_files(
            self.peer_tls.ca_file,
            shown.certificate_file if shown is not None else None,
            shown.key_file if shown is not None else None,
            self.peer_tls.server_name,
            fields=("peer_tls.ca_file", "peer_tls.certificate_file", "peer_tls.key_file"),
        )


class ServerSettings(TransportSettings):
    """Settings that all servers share. A service subclasses it and adds its own fields."""

    # What was given is not repeated in errors: it may be a secret where none belongs.
    model_config = SettingsConfigDict(extra="forbid", hide_input_in_errors=True)

    listen_host: str = "127.0.0.1"
    listen_port: int = Field(default=0, ge=0, le=65535)
    """0: a free port, reported in `ready_file`."""
    reuse_port: bool = False
    """Bind although another socket of this user is bound to the port: the supervisor keeps ports that way."""
    advertise_address: str = ""
    """`host:port` that others reach this server at; by default `listen_host` and the bound port. With `tls`
    others are told `grpcs://host:port`, unless it names a scheme itself."""
    service_key_file: Path | None = None
    bootstrap_key_file: Path | None = None
    require_job_tokens: bool = False
    """Take calls for a job only with its token, and the keys of users beside the two above; both are known to
    the scheduler, which is asked. On wherever a scheduler started the server."""
    nats_url: str = ""
    """Empty: no event bus; everyone polls the truth."""
    nats_token_file: Path | None = None
    s3: S3Settings | None = None
    scheduler_address: str = ""
    """`host:port`; of a scheduler with replicas `host:port,host:port`, or `dns:///name:port`."""
    scheduler_address_file: Path | None = None
    """A file holding the scheduler's address, read again at every reconnect; wins over
    `scheduler_address`.
    """
    state_dir: Path = Path(".opentinker")
    lifeline_fd: int | None = None
    """Read end of the supervisor's pipe, inherited; the server ends when it closes."""
    ready_file: Path | None = None
    """Written once the server serves: JSON with `port`, `address` and `pid`."""
    drain_s: float = Field(default=10.0, ge=0)
    """How long running calls may take to finish when the server is told to stop."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Serve metrics for Prometheus there, at /metrics; 0: a free port, which `ready_file` names."""
    metrics_host: str = "127.0.0.1"
    metrics_key_file: Path | None = None
    """The bearer token that whoever reads them has to send."""
    traces_endpoint: str = ""
    """OTLP collector of traces, `http://host:4318/v1/traces`; empty: no traces."""
    traces_file: Path | None = None
    """Append spans there, as lines of JSON."""
    instance_id: str = ""
    log_level: str = "INFO"
    log_json: bool = True

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # The file arrives as init arguments (see load_settings) and yields to the environment.
        return env_settings, init_settings

    @model_validator(mode="after")
    def _keys_unless_loopback(self) -> Self:
        keys = self.service_key_file and self.bootstrap_key_file
        if self.listen_host not in LOOPBACK and not keys:
            raise ValueError(
                f"listen_host {self.listen_host!r} can be reached from other machines, so service_key_file "
                "and bootstrap_key_file are required; make keys, or listen on 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _key_for_metrics(self) -> Self:
        if self.metrics_port is not None and self.metrics_host not in LOOPBACK and not self.metrics_key_file:
            raise ValueError(
                f"metrics_host {self.metrics_host!r} can be reached from other machines, so metrics_key_file "
                "is required: the metrics name projects and what they do"
            )
        return self

    @model_validator(mode="after")
    def _scheduler_for_tokens(self) -> Self:
        keys = self.service_key_file and self.bootstrap_key_file
        scheduler = self.scheduler_address or self.scheduler_address_file
        if self.require_job_tokens and not (keys and scheduler):
            raise ValueError(
                "require_job_tokens needs service_key_file and bootstrap_key_file, and scheduler_address or "
                "scheduler_address_file: the scheduler knows the keys that tokens are checked with"
            )
        return self

    def service_key(self) -> str | None:
        return read_secret(self.service_key_file) if self.service_key_file else None

    def bootstrap_key(self) -> str | None:
        return read_secret(self.bootstrap_key_file) if self.bootstrap_key_file else None

    def metrics_key(self) -> str | None:
        return read_secret(self.metrics_key_file) if self.metrics_key_file else None

    def nats_token(self) -> str | None:
        return read_secret(self.nats_token_file) if self.nats_token_file else None

    def resolve_scheduler_address(self) -> str:
        """The scheduler's address now; ValueError if none is configured."""
        if self.scheduler_address_file is not None and self.scheduler_address_file.exists():
            return self.scheduler_address_file.read_text().strip()
        if not self.scheduler_address:
            raise ValueError("set scheduler_address or scheduler_address_file")
        return self.scheduler_address


SettingsT = TypeVar("SettingsT", bound=ServerSettings)


def load_settings(cls: type[SettingsT], argv: Sequence[str] | None = None) -> SettingsT:
    """Settings from `--settings FILE.json` and the environment; exits with a readable text if wrong."""
    parser = argparse.ArgumentParser(
        description=(cls.__doc__ or "").strip().splitlines()[0] if cls.__doc__ else None
    )
    parser.add_argument("--settings", type=Path, help="JSON file with settings, readable by its owner only")
    path: Path | None = parser.parse_args(argv).settings
    try:
        return cls(**(_read_file(path) if path else {}))
    except ValueError as error:
        parser.error(str(error))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"settings file {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"settings file {path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"settings file {path} must hold one JSON object")
    return value


def read_secret(path: Path) -> str:
    """The secret in a file. PermissionError if others than its owner may read it, ValueError if empty."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise PermissionError(f"{path} may be read by others (mode {mode:o}); run: chmod 600 {path}")
    secret = path.read_text().strip()
    if not secret:
        raise ValueError(f"{path} is empty")
    return secret
