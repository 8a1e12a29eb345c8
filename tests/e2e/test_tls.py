"""A whole cluster behind mutual TLS: the client, the scheduler, the servers that it starts, and env_host."""

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import opentinker as ot
from opentinker import errors
from opentinker.connection import stack
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
    gateway = {"peer_tls": {**calls["peer_tls"], **shown}}
    directory = tmp_path_factory.mktemp("stack")
    reader, writer = os.pipe()
    child = stack.launch(
        directory, {"scheduler": serves, "env_host": serves, "gateway": gateway}, owner_fd=reader
    )
    os.close(reader)
    try:
        ready = stack.wait_until_ready(directory, child, lambda text: None)
        assert ready is not None
        yield ready
    finally:
        os.close(writer)
        child.wait(timeout=60)


def test_a_policy_is_trained_and_sampled_over_mutual_tls(
    info: dict[str, Any], certs: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
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
    with pytest.raises(errors.TlsFailed, match="only callers with a certificate"):
        ot.connect(info["scheduler"], key=key, tls_ca=certs / "ca.pem", progress=False)
    with pytest.raises(errors.TlsFailed, match="grpcs://"):
        ot.connect(info["scheduler"], key=key, progress=False)


def test_the_gateway_calls_the_scheduler_by_tls(info: dict[str, Any]) -> None:
    with urllib.request.urlopen(f"{info['gateway']}/health", timeout=60) as answer:
        assert json.load(answer) == {"status": "serving"}
