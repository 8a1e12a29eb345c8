"""A whole cluster behind mutual TLS, with metrics and traces: the client, the scheduler, the servers that it
starts, env_host and the gateway.
"""

import json
import os
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import opentinker as ot
from opentinker import errors
from opentinker.connection import stack
from opentinker_kit.testing import free_port
from opentinker_kit.testing.metrics import scrape
from opentinkerapi.runtime import tracing
from opentinkerapi.runtime.certificates import make_certificates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAINER = ot.ServerOptions(engine="torch", dtype="float32", context_tokens=1024)
INFERENCE = ot.ServerOptions(engine="transformers", dtype="float32", context_tokens=1024)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def info(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What is said of an embedded stack whose servers call each other, and are called, by mutual TLS."""
    calls = {"peer_tls": {"ca_file": str(certs / "ca.pem")}}
    serves = {
        "tls": {
            "certificate_file": str(certs / "server.pem"),
            "key_file": str(certs / "server.key"),
            "client_ca_file": str(certs / "ca.pem"),
        },
        **calls,
    }
    shown = {"certificate_file": str(certs / "client.pem"), "key_file": str(certs / "client.key")}
    gateway = {"peer_tls": {**calls["peer_tls"], **shown}, "metrics_port": 0}
    directory = tmp_path_factory.mktemp("stack")
    seen = {"traces_file": str(directory / "spans.jsonl")}
    started = {role: {"metrics_port": free_port()} for role in ("trainer", "inference")}
    parts = {
        "scheduler": {**serves, **seen, "metrics_port": 0, "server_settings": started},
        "env_host": {**serves, **seen},
        "gateway": gateway,
    }
    reader, writer = os.pipe()
    child = stack.launch(directory, parts, owner_fd=reader)
    os.close(reader)
    try:
        ready = stack.wait_until_ready(directory, child, lambda text: None)
        assert ready is not None
        ports = {role: told["metrics_port"] for role, told in started.items()}
        report = json.loads((directory / "scheduler" / "ready.json").read_text())
        yield {
            **ready,
            "spans": Path(seen["traces_file"]),
            "directory": directory,
            "metrics": {**ports, "scheduler": report["metrics_port"]},
        }
    finally:
        os.close(writer)
        child.wait(timeout=60)


def test_a_policy_is_trained_and_sampled_over_mutual_tls(
    info: dict[str, Any],
    certs: Path,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_tracer", None)
    monkeypatch.setenv("OPENTINKER_TRACES_FILE", str(info["spans"]))
    key = Path(info["bootstrap_key_file"]).read_text().strip()
    files = {"tls_ca": certs / "ca.pem", "tls_cert": certs / "client.pem", "tls_key": certs / "client.key"}
    with ot.connect(f"grpcs://{info['scheduler']}", key=key, **files, progress=False) as cluster:
        result = ot.fit(
            env="guess_number",
            env_options={"low": 0, "high": 4},
            model=str(tiny_model_dir),
            tuning=ot.LoRA(rank=4),
            algorithm=ot.GRPO(group_size=4),
            groups_per_step=2,
            steps=2,
            learning_rate=1e-3,
            sampling=ot.SamplingParams(max_tokens=6),
            seed=3,
            run_dir=tmp_path / "run",
            trainer=TRAINER,
            inference=INFERENCE,
            progress=False,
            cluster=cluster,
        )
        assert result.steps == 2
        servers = cluster.servers().result()
        assert servers
        # Servers say themselves how they are called.
        assert all(server.address.startswith("grpcs://127.0.0.1:") for server in servers)
        check_metrics(info["metrics"], certs)
    check_traces(info["spans"])
    with pytest.raises(errors.TlsFailed, match="only callers with a certificate"):
        ot.connect(info["scheduler"], key=key, tls_ca=certs / "ca.pem", progress=False)
    with pytest.raises(errors.TlsFailed, match="grpcs://"):
        ot.connect(info["scheduler"], key=key, progress=False)


def check_metrics(ports: dict[str, int], certs: Path) -> None:
    """Each server counted what it did, and shows it to who has a certificate."""
    context = ssl.create_default_context(cafile=str(certs / "ca.pem"))
    context.load_cert_chain(certs / "client.pem", certs / "client.key")
    pages = {name: scrape(port, tls=context) for name, port in ports.items()}
    assert pages["scheduler"].value("opentinker_scheduler_grants_total", project="default") >= 2
    assert pages["scheduler"].value("opentinker_scheduler_servers", state="ready", role="trainer") == 1
    steps = {"kind": "optim_step", "state": "done"}
    assert pages["trainer"].value("opentinker_trainer_operation_seconds_count", **steps) == 2
    assert pages["trainer"].value("opentinker_trainer_tokens_trained_total") > 0
    assert pages["inference"].value("opentinker_inference_tokens_total", kind="sampled") > 0


def check_traces(path: Path) -> None:
    """The run is one trace through every process that had a part in it."""
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    (run,) = (span for span in spans if span["name"] == "fit")
    trace = [span for span in spans if span["context"]["trace_id"] == run["context"]["trace_id"]]
    by_id = {span["context"]["span_id"]: span for span in trace}

    def service(span: dict[str, Any]) -> str:
        return str(span["resource"]["attributes"]["service.name"])

    def parents(span: dict[str, Any]) -> list[str]:
        found = by_id.get(span["parent_id"] or "")
        return [service(span), *(parents(found) if found else [])]

    assert {service(span) for span in trace} == {"client", "scheduler", "trainer", "inference", "env_host"}
    (step, *_) = (span for span in trace if span["name"] == "operation optim_step")
    # The operation, the call that brought it, and the client's side of that call; then the run.
    assert parents(step)[:3] == ["trainer", "trainer", "client"]
    (sampled, *_) = (span for span in trace if span["name"].endswith("InferenceService/Sample"))
    assert sampled["attributes"]["opentinker.outcome"] == "OK"
    names = {span["name"] for span in trace if service(span) == "scheduler"}
    assert any(name.endswith("SchedulerService/CreateJob") for name in names)


def test_the_gateway_calls_the_scheduler_by_tls(info: dict[str, Any]) -> None:
    with urllib.request.urlopen(f"{info['gateway']}/health", timeout=60) as answer:
        assert json.load(answer) == {"status": "serving"}
    report = json.loads((info["directory"] / "gateway" / "ready.json").read_text())
    asked = {"method": "GET", "route": "/health", "status": "200"}
    page = scrape(report["metrics_port"])
    assert page.value("opentinker_gateway_request_seconds_count", **asked) == 1
