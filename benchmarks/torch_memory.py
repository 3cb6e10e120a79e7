"""PyTorch's memory on a card, phase by phase, for three training steps in float32, eager: what plans are held beside.

    python benchmarks/torch_memory.py

After inputs, after the model, and of each step after the forward pass, the backward pass and the update: MiB of live
tensors and MiB that the allocator has reserved, and the most of both since the phase before. Writes
`results/pytorch-memory-CARD.json`. Models are the benchmarks' own and torchvision's.
"""

from __future__ import annotations

import gc
import json
from typing import Any

import torch
import torch_gpu
from gpu import results
from torch.nn import functional as F

MIB = 1 << 20
# Models, and in what a step differs from Nesterov momentum, gradients set to None, by PyTorch's own defaults.
CASES: tuple[dict[str, Any], ...] = (
    {"model": "conv_chain"},
    {"model": "conv_chain", "cudnn_benchmark": True},
    {"model": "conv_chain", "zeroed": True},
    {"model": "conv_chain", "loss_kept": True},
    {"model": "resnet50:batch=32"},
    {"model": "resnet50:batch=32", "cudnn_benchmark": True},
    {"model": "resnet50:batch=32", "zeroed": True},
    {"model": "resnet50:batch=32", "loss_kept": True},
    {"model": "resnet50:batch=32", "foreach": False},
    {"model": "resnet50:batch=32", "adam": True},
    {"model": "unet:batch=4,size=256"},
    {"model": "gpt2_small:batch=4,seq=1024"},
    {"model": "gpt2_small:batch=4,seq=1024", "adam": True},
    {"model": "mlp:width=4096,batch=1024"},
    {"model": "torchvision vit_b_16:batch=32"},
    {"model": "torchvision resnet101:batch=20"},
    {"model": "torchvision mobilenet_v2:batch=32"},
)


def now() -> dict[str, float]:
    """MiB, and the most of them since this was asked before."""
    torch.cuda.synchronize()
    found = {
        "live": torch.cuda.memory_allocated() / MIB,
        "reserved": torch.cuda.memory_reserved() / MIB,
        "most_live": torch.cuda.max_memory_allocated() / MIB,
        "most_reserved": torch.cuda.max_memory_reserved() / MIB,
    }
    torch.cuda.reset_peak_memory_stats()
    return found


def build(name: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A model, its input and its target."""
    if not name.startswith("torchvision "):
        return torch_gpu.build(name)
    import torchvision

    kind, _, batch = name.removeprefix("torchvision ").partition(":batch=")
    model = getattr(torchvision.models, kind)()
    return model, torch.randn(int(batch), 3, 224, 224), torch.randint(1000, (int(batch),))


def optimizer_of(case: dict[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    """A case's optimizer, of the weights that are trained."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    foreach = case.get("foreach")
    if case.get("adam"):
        return torch.optim.Adam(weights, 1e-4, foreach=foreach)
    return torch.optim.SGD(weights, 1e-4, momentum=0.9, nesterov=True, foreach=foreach)


def loss_of(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The forward pass and the loss; the model's output is let go."""
    y = model(x)
    if target.is_floating_point():
        return F.mse_loss(y, target)
    return F.cross_entropy(y.flatten(0, -2) if y.dim() == 3 else y, target)


def phases(case: dict[str, Any]) -> dict[str, Any]:
    """Of one case; what other cases have left is given back to the card first."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = case.get("cudnn_benchmark", False)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    before = now()["live"]
    model, x, target = build(case["model"])
    x, target = x.to("cuda"), target.to("cuda")
    found: dict[str, Any] = {"after_inputs": now()}
    model = model.to("cuda")
    found["after_model"] = now()
    optimizer = optimizer_of(case, model)
    loss, steps = None, []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=not case.get("zeroed", False))
        if not case.get("loss_kept"):
            loss = None
        loss = loss_of(model, x, target)
        step = {"forward": now()}
        loss.backward()
        step["backward"] = now()
        optimizer.step()
        step["update"] = now()
        steps.append(step)
    return {**case, "left_by_others": before, **found, "steps": steps}


def main() -> None:
    """Every case, into one file."""
    card = torch.cuda.get_device_name()
    rows = []
    for case in CASES:
        rows.append(phases(case))
        peak = rows[-1]["steps"][-1]["backward"]
        print(case, f"{peak['most_live']:,.0f} MiB live, {peak['most_reserved']:,.0f} reserved", flush=True)
    about = {"card": card, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    results("pytorch-memory", card).write_text(json.dumps({**about, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
