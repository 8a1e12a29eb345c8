"""The parts of `make gpu-check`. Each is a program that is given a `Setup` and prints one line of JSON."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "4090": 165.0,
}
"""Dense bfloat16 matrix products a second by a part of the GPU's name, as the makers give it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What the parts have in common."""

    model: str
    device: str
    """"cuda" or "cpu": where the trainer computes."""
    engine: str
    """Of the inference server."""
    scratch: str
    """A directory for what they write."""
    requests: int
    """Sampled at once."""
    new_tokens: int
    rows: int
    """Trained on in a step."""
    row_tokens: int
    steps: int
    """Timed, after one that is not."""
    peak_tflops: float | None
    """Of the device; None: unknown, so no utilization is given."""

    @classmethod
    def of_argument(cls) -> "Setup":
        """From the program's only argument."""
        return cls(**json.loads(sys.argv[1]))

    def argument(self) -> str:
        return json.dumps(asdict(self))

    def utilization(self, flops_per_s: float) -> float | None:
        """Model flops over what the device could do."""
        return None if self.peak_tflops is None else round(flops_per_s / (self.peak_tflops * 1e12), 4)


def peak_tflops(device_name: str) -> float | None:
    """Of a GPU by its name; None if it is not in the table."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def matrix_weights(model_dir: Path) -> int:
    """How many weights a token is multiplied with: all matrices but the embedding, which is looked up. The
    output layer counts, also where it is the embedding.
    """
    from opentinker_kit.safetensors_header import checkpoint_shapes

    shapes = checkpoint_shapes(model_dir)
    sizes = {name: _size(shape) for name, shape in shapes.items() if len(shape) == 2}
    embedding = sum(size for name, size in sizes.items() if "embed_tokens" in name)
    tied = not any(name.startswith("lm_head") for name in sizes)
    return sum(sizes.values()) - (0 if tied else embedding)


def vocabulary_of(model_dir: Path) -> int:
    """How many token ids a model has."""
    size: int = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    return size


def _size(shape: tuple[int, ...]) -> int:
    rows, columns = shape
    return rows * columns


def report(part: Callable[[Setup], Mapping[str, object]]) -> None:
    """Run a part and print what it found."""
    print(json.dumps(part(Setup.of_argument())), flush=True)
