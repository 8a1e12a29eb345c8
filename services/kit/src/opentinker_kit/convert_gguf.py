"""Convert a GGUF file to a float32 safetensors directory: `python -m opentinker_kit.convert_gguf FILE
DIRECTORY`.

Run once for each model, in a process of its own: it loads torch, which no server's front may.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, directory: Path) -> None:
    """Write config.json, model.safetensors, generation_config.json and the tokenizer's files to
    `directory`.
    """
    quantization = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=quantization
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are plain now; what remembers the quantization would have loaders look for it.
    for name in ("quantization_config",):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.hf_quantizer = None
    model.is_quantized = False
    directory.mkdir(parents=True)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    if "quantization_config" in config:
        raise SystemExit(f"{directory}/config.json still names a quantization")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    convert(arguments.gguf, arguments.directory)


if __name__ == "__main__":
    main()
