"""The compose file and the Dockerfiles, as far as they can be checked without a Docker engine."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "compose.yaml"
WITH_TLS = ROOT / "deploy" / "compose.tls.yaml"
DOCKERFILES = sorted(ROOT.glob("services/*/Dockerfile"))
SERVICES = ("env_host", "gateway", "inference", "scheduler", "trainer")
THIRD_PARTY = ("minio", "nats")
SETTINGS = {
    "env_host": "EnvHostSettings",
    "gateway": "GatewaySettings",
    "inference": "InferenceSettings",
    "scheduler": "SchedulerSettings",
    "trainer": "TrainerSettings",
}


def compose(file: Path = COMPOSE) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(file.read_text())
    return loaded


@pytest.mark.parametrize("file", [COMPOSE, WITH_TLS], ids=["compose", "tls"])
def test_compose_follows_the_schema(file: Path) -> None:
    check = [
        Path(sys.executable).parent / "check-jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        file,
    ]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_has_each_service_with_a_health_check() -> None:
    services = compose()["services"]
    assert set(services) == {*SERVICES, *THIRD_PARTY, "keys"}
    assert all("healthcheck" in services[name] for name in (*SERVICES, *THIRD_PARTY))
    for name in SERVICES:
        assert (ROOT / services[name]["build"]["dockerfile"]).exists()
        assert "scheduler:/state" in services["scheduler"]["volumes"], "SQLite lies on a volume"


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_accepts_the_settings_that_compose_passes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in compose()["services"][name]["environment"].items():
        monkeypatch.setenv(key, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value))
    settings_class = getattr(importlib.import_module(f"opentinker_{name}.settings"), SETTINGS[name])
    unknown = {
        key
        for key in compose()["services"][name]["environment"]
        if key.removeprefix("OPENTINKER_").split("__")[0].lower() not in settings_class.model_fields
    }
    assert not unknown, f"{name} has no such settings"
    settings = settings_class()
    assert settings.listen_host == "0.0.0.0"
    if settings.s3 is not None:
        assert settings.s3.public_endpoint == "http://localhost:9000"
    if name != "scheduler":
        assert settings.advertise_address == f"localhost:{settings.listen_port}"


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_takes_its_certificates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = compose(WITH_TLS)["services"][name]
    assert set(compose(WITH_TLS)["services"]) == set(SERVICES)
    for key, value in (compose()["services"][name]["environment"] | service["environment"]).items():
        monkeypatch.setenv(key, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value))
    settings_class = getattr(importlib.import_module(f"opentinker_{name}.settings"), SETTINGS[name])
    settings = settings_class()
    assert str(settings.tls.certificate_file) == "/certs/server.pem"
    assert str(settings.peer_tls.ca_file) == "/certs/ca.pem"
    # OpenAI's clients have no certificate.
    assert (settings.tls.client_ca_file is None) == (name == "gateway")


def test_published_ports_are_on_this_host_unless_asked_otherwise() -> None:
    for name, service in compose()["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("${OPENTINKER_BIND:-127.0.0.1}:"), f"{name} publishes {port}"


def test_keys_are_made_at_the_first_start_and_none_is_committed() -> None:
    services = compose()["services"]
    assert services["keys"]["entrypoint"] == ["python", "-m", "opentinker_kit.keys", "/keys"]
    for name in (*THIRD_PARTY, *SERVICES):
        assert "keys:/keys:ro" in services[name]["volumes"], f"{name} does not get the keys, read-only"
        for key, value in services[name].get("environment", {}).items():
            named = re.search(r"KEY|TOKEN|PASSWORD|SECRET", key) and key != "OPENTINKER_S3__ACCESS_KEY"
            secret = named and str(value) not in ("true", "false")
            assert not secret or key.endswith("_FILE"), (
                f"{name}: {key} holds a secret, not the name of a file"
            )
            assert not secret or value.startswith("/keys/")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_each_image_is_pinned_built_in_two_stages_and_not_run_as_root(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    lines = text.splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert len(bases) == 2
    assert all(":" in base and not base.endswith(":latest") for base in bases)
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users == ["opentinker"]
    constraints = f"deploy/constraints/{dockerfile.parent.name}.txt"
    assert f"COPY {constraints} constraints.txt" in text
    assert (ROOT / constraints).exists()
    installs = re.findall(r"pip install (\S+)", text)
    assert installs
    assert set(installs) == {"--constraint"}


def test_each_service_has_an_image() -> None:
    assert tuple(path.parent.name for path in DOCKERFILES) == SERVICES


def test_pins_are_exact() -> None:
    files = sorted((ROOT / "deploy" / "constraints").glob("*.txt"))
    assert {path.stem for path in files} == {*SERVICES, "dev"}
    for path in files:
        pins = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert pins
        assert all(re.fullmatch(r"[a-z0-9.-]+==[^=,<>*+]+", pin) for pin in pins), path
