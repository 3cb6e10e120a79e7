"""Training steps of the benchmarks' models on a card in PyTorch, as PyTorch's users write them for speed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_models
from torch import nn
from torch.nn import functional as F

MODES = {"eager": None, "compile": "default", "compile, graphs": "reduce-overhead"}  # of torch.compile


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        parts: list[nn.Module] = []
        for channels in (inputs, outputs):
            parts += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
            parts.append(nn.ReLU(inplace=True))
        super().__init__(*parts)


class Unet(nn.Module):
    def __init__(self, classes: int = 2, width: int = 64) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.downs = nn.ModuleList(DoubleConv(a, b) for a, b in zip((3, *widths), widths))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[:-1])
        self.joins = nn.ModuleList(DoubleConv(2 * w, w) for w in widths[:-1])
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for level, down in enumerate(self.downs):
            x = down(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for level in reversed(range(4)):
            x = self.joins[level](torch.cat([kept[level], self.ups[level](x)], 1))
        return self.out(x)


def build(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model of the zoo, its input and its target."""
    if not name.startswith("unet"):
        model, (x, target) = torch_models.build(name)
        return model, x, target
    sizes = {
        key: int(value) for key, _, value in (part.partition("=") for part in name.partition(":")[2].split(",") if part)
    }
    batch, size = sizes.get("batch", 4), sizes.get("size", 256)
    return Unet(), torch.randn(batch, 3, size, size), torch.randint(2, (batch, size, size))


def stepper(name: str, form: str, precision: str) -> Callable[[int], float]:
    """A function that runs a number of steps, waits for them, and returns the last one's loss.

    Args:
        form: one of MODES.
        precision: float32, tf32 or bf16 (autocast).
    """
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    model, x, target = build(name)
    layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    model = model.to("cuda", memory_format=layout)
    x, target = x.to("cuda", memory_format=layout), target.to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9, nesterov=True, fused=True)

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            y = model(x)
            if target.is_floating_point():
                return F.mse_loss(y, target)
            scores = y.flatten(0, -2) if y.dim() == 3 else y  # a sequence's scores lie last, an image's second
            return F.cross_entropy(scores, target)

    mode = MODES[form]
    run = forward if mode is None else torch.compile(forward, mode=mode)

    def steps(count: int) -> float:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            loss = run()
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        return float(loss)

    return steps
