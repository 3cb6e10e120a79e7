"""PyTorch's memory in training GPT-2 small with and without adapters, counted without a card, beside foreplan's plans.

    python -m benchmarks.torch_meta

Steps run eagerly on the device `meta`, where tensors have storages without bytes, and the storages that are alive are
counted, as PyTorch's `MemTracker` does, which takes no frozen weights. Attention is the op that PyTorch takes on cards
in float32. Added is the workspace of cuBLAS, as `torch_memory.py` has measured it. What libraries and the allocator
take within an op is not counted, so the same is done first for cases that `torch_memory.py` has measured. Needs `peft`,
and `torchvision` for one of these cases. Prints all, and writes both tables into docs/building-on-a-model.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import peft
import torch
from torch.nn import functional as F

import foreplan as fp
from tests.torch.alive import Alive

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch_memory
from gpu import results
from pages import MIB, put

PAGE = "docs/building-on-a-model.md"
GPT2 = "gpt2_small:batch=4,seq=1024"
MEASURED = json.loads(results("pytorch-memory", "NVIDIA H100 80GB HBM3").read_text())
KNOWN = (
    (GPT2, True),
    (GPT2, False),
    ("mlp:width=4096,batch=1024", False),
    ("torchvision vit_b_16:batch=32", False),
    ("resnet50:batch=32", False),
    ("unet:batch=4,size=256", False),
    ("conv_chain", False),
)
ADAPTERS = {"all weights": None, "LoRA": {"use_dora": False}, "DoRA": {"use_dora": True}}
TARGETS = ("numpy", "cuda:h100")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, is_causal: bool = False, **__: Any) -> Any:
    """Of float32 on a card, where flash attention takes halves only."""
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]


def peak(case: dict[str, Any], adapters: dict[str, Any] | None = None) -> float:
    """The most MiB that are alive within three steps."""
    with torch.device("meta"):
        model, x, target = torch_memory.build(case["model"])
        if adapters is not None:
            config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["attn", "proj"], **adapters)
            model = peft.get_peft_model(model, config)
    optimizer = torch_memory.optimizer_of({"foreach": True, **case}, model)  # which is the default on cards
    alive = Alive()
    for tensor in (*model.parameters(), *model.buffers(), x, target):
        alive.count(tensor)
    with alive:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            loss = torch_memory.loss_of(model, x, target)
            loss.backward()
            optimizer.step()
    return alive.most / MIB


def measured(name: str, adam: bool) -> tuple[float, float]:
    """The most MiB that were alive on the card in the last step, and those of them that cuBLAS's workspace takes."""
    plain = {"model": name} | ({"adam": True} if adam else {})
    about = {"left_by_others", "after_inputs", "after_model", "steps"}
    (case,) = [each for each in MEASURED["cases"] if {k: v for k, v in each.items() if k not in about} == plain]
    most = max(phase["most_live"] for phase in case["steps"][-1].values())
    return most, 0.0 if name == "conv_chain" else workspace()  # the chain has no product, and ran first


def workspace() -> float:
    """MiB that stay when all tensors of a model have gone."""
    return next(each["left_by_others"] for each in reversed(MEASURED["cases"]) if each["model"] == GPT2)


def compared(name: str, adam: bool) -> str:
    """A row of the comparison with what was measured."""
    most, libraries = measured(name, adam)
    found = peak({"model": name, "adam": adam}) + libraries
    optimizer = "Adam" if adam else "Nesterov"
    difference = f"{100 * (found / most - 1):+.1f} %".replace("-", "−")
    return f"| {name} | {optimizer} | {found:,.0f} | {most:,.0f} | {difference} |"


def planned(target: str, adam: bool, adapters: dict[str, Any] | None, remat: str) -> str:
    """MiB of foreplan's arena."""
    graph = fp.models.build(GPT2)
    if adapters is not None:
        graph = fp.lora(graph, targets=["h.*.attn"], dora=adapters["use_dora"])
    optimizer = fp.optim.AdamW(1e-3) if adam else fp.optim.Nesterov(1e-3)
    step = fp.compile(graph, fp.losses.cross_entropy, optimizer, target=target, remat=remat)
    return f"{step.arena_bytes / MIB:,.0f}"


def row(kind: str, adam: bool) -> str:
    """Of what is trained, by which optimizer."""
    adapters = ADAPTERS[kind]
    counted = peak({"model": GPT2, "adam": adam}, adapters) + workspace()
    cells = [kind, "AdamW" if adam else "Nesterov", f"{counted:,.0f}"]
    cells += [planned(target, adam, adapters, remat) for target in TARGETS for remat in ("off", "auto")]
    return f"| {' | '.join(cells)} |"


def table(name: str, head: list[str], rows: Iterable[str]) -> None:
    """Print a table row by row, and write it into the page."""
    lines = []
    for line in chain(head, rows):
        print(line, flush=True)
        lines.append(line)
    put(PAGE, name, "\n".join(lines))


def main() -> None:
    """Both tables."""
    F.scaled_dot_product_attention = attention
    head = ["| PyTorch, MiB | optimizer | counted | measured on an H100 | |", "|---|---|---|---|---|"]
    table("counted", head, (compared(*case) for case in KNOWN))
    titles = "".join(f" `{name}`, `--remat off` | `{name}` |" for name in TARGETS)
    head = [f"| trained, MiB | optimizer | PyTorch |{titles}", "|---|---|---|---|---|---|---|"]
    table("beside PyTorch", head, (row(kind, adam) for kind in ADAPTERS for adam in (True, False)))


if __name__ == "__main__":
    main()
