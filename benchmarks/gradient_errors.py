"""Errors of gradients beside float64's: ours, with and without convolutions by Winograd's algorithm, and PyTorch's.

    python benchmarks/gradient_errors.py [--seeds N] [--only TEXT] [--target cpu]

For each net of `nets.py` that is named here, weights and data are drawn anew for every seed. PyTorch computes the
gradients in float64, which count as right, and in float32. The error of a net is that of its worst weight:
|g - g64| / |g64|, norms over the weight's elements; of weights whose gradient is not nothing but rounding. A ReLU
whose input is near zero may go either way with any rounding; so errors of the three vary by themselves, and each is
told as median and largest over the seeds. Writes a table into benchmarks/results/cpu.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping

import numpy as np
import torch
from nets import NETS
from pages import put
from torch.nn import functional as F

import foreplan as fp

CHOSEN = (
    "ResNet-18, 8 images",
    "VGG-16, 2 images",
    "U-Net, 4 images of 64²",
    "3-D convolutions, 2 x 3 x 16 x 56²",
    "GPT-2 of 4 layers, 2 x 256",
    "LSTM, width 256, 32 x 64",
)
HEAD = (
    "| net | PyTorch: median | largest | foreplan: median | largest | `strict`: median | largest |",
    "|---|---|---|---|---|---|---|",
)
NOTHING = 1e-6  # of the largest gradient's norm: less is the rounding of sums that are zero
Gradients = Mapping[str, np.ndarray]


def errors(name: str, seed: int, target: str) -> tuple[float, float, float]:
    """The worst error of PyTorch's gradients, of ours, and of ours with strict accuracy."""
    torch.manual_seed(seed)
    module, inputs, wanted = NETS[name].build()
    graph = fp.from_torch(module, *inputs)
    module.train()
    theirs = _pytorch(module, inputs, wanted)
    module.double()
    right = _pytorch(module, tuple(_double(x) for x in inputs), _double(wanted))
    loss = "mse" if wanted.is_floating_point() else "cross_entropy"
    data = {value.name: x.numpy() for value, x in zip(graph.inputs, inputs)} | {"target": wanted.numpy()}
    ours = [
        fp.compile(graph, loss=loss, target=target, **how).bind().step(data).gradients
        for how in ({}, {"accuracy": "strict"})
    ]
    if any(len(found) != len(list(module.parameters())) for found in ours):
        raise SystemExit(f"{name}: ours has gradients of {len(ours[0])} weights, and PyTorch of {len(theirs)}")
    return _worst(theirs, right), _worst(ours[0], right), _worst(ours[1], right)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def _pytorch(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], wanted: torch.Tensor) -> Gradients:
    module.zero_grad()
    y = module(*inputs)
    (F.mse_loss(y, wanted) if wanted.is_floating_point() else F.cross_entropy(y, wanted)).backward()
    weights = module.named_parameters(remove_duplicate=False)  # a tied one has several names
    return {name: np.array(weight.grad) for name, weight in weights}


def _worst(found: Gradients, right: Gradients) -> float:
    norms = {name: float(np.linalg.norm(right[name])) for name in found}
    least = NOTHING * max(norms.values())
    return max(float(np.linalg.norm(found[name] - right[name])) / norm for name, norm in norms.items() if norm > least)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="nets whose names have this in them")
    parser.add_argument("--target", default="cpu:threads=1")
    arguments = parser.parse_args()
    rows = []
    for name in (name for name in CHOSEN if arguments.only in name):
        columns = list(zip(*(errors(name, seed, arguments.target) for seed in range(arguments.seeds))))
        cells = [f"{each:.1e}" for column in columns for each in (statistics.median(column), max(column))]
        rows.append("| " + " | ".join([name, *cells]) + " |")
        print(rows[-1], flush=True)
    if not arguments.only:
        put("benchmarks/results/cpu.md", "gradients", "\n".join([*HEAD, *rows]))


if __name__ == "__main__":
    main()
