"""Our forward and backward pass of an adapted layer against finite differences and against peft's own."""

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from opentinker_trainer.engine.lora_linear import lora_linear, speed_up


def test_its_gradients_are_right() -> None:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    x, a, b = leaf(2, 3, 5), leaf(2, 5), leaf(4, 2)
    weight, bias = leaf(4, 5).detach(), leaf(4).detach()
    assert torch.autograd.gradcheck(lambda x, a, b: lora_linear(x, weight, bias, a, b, 1.7), (x, a, b))
    expected = x @ weight.T + bias + 1.7 * (x @ a.T @ b.T)
    torch.testing.assert_close(lora_linear(x, weight, bias, a, b, 1.7), expected)
    # The first layer's input takes no gradient.
    assert torch.autograd.gradcheck(lambda a, b: lora_linear(x.detach(), weight, bias, a, b, 1.7), (a, b))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_peft_computes(dtype: torch.dtype) -> None:
    """Output and gradients, of whichever adapter is active, and of none."""
    torch.manual_seed(0)
    base = Tiny().to(dtype).requires_grad_(False)
    model = peft.PeftModel(base, peft.LoraConfig(r=2, target_modules=["first", "second"]), adapter_name="one")
    model.add_adapter("two", peft.LoraConfig(r=4, lora_alpha=32, target_modules=["second"]))
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32)
    x = torch.randn(5, 6).to(dtype)

    def results() -> list[torch.Tensor]:
        found = []
        for key in ("one", "two"):
            model.set_adapter(key)
            output = model(x)
            trained = [p for name, p in model.named_parameters() if f".{key}." in name]
            found += [output, *torch.autograd.grad(output.float().square().sum(), trained)]
        with model.disable_adapter():
            found.append(model(x))
        return [tensor.detach().float() for tensor in found]

    expected = results()
    for layer in layers:
        speed_up(layer)
        speed_up(layer)
    assert all(type(layer.forward).__name__ == "_FastForward" for layer in layers)
    bound = 1e-5 if dtype == torch.float32 else 0.05
    for ours, peft_own in zip(results(), expected, strict=True):
        assert ours.shape == peft_own.shape
        torch.testing.assert_close(ours, peft_own, atol=bound * float(peft_own.abs().max()), rtol=0)
    # What comes later is found, what goes is not missed.
    model.add_adapter("three", peft.LoraConfig(r=1, target_modules=["first"]))
    model.set_adapter("three")
    assert torch.isfinite(model(x).float()).all()
    model.set_adapter("one")
    model.delete_adapter("three")
    torch.testing.assert_close(
        model(x).float(), expected[0], atol=bound * float(expected[0].abs().max()), rtol=0
    )
