"""Which precisions the engine knows, and what it accumulates in."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Storage of the base model. float64 is there for tests of exactness."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Logprobs and losses are float32, whatever the base is stored in; float64 stays."""
    return torch.float64 if dtype == torch.float64 else torch.float32
