"""A module at hand on a card that is not here, beside what PyTorch took on an H100: live tensors after each phase and
the most within it, to the workspace of cuBLAS, which is not counted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch.nn import functional as F  # noqa: E402

import foreplan as fp  # noqa: E402
from tests.eager.card import MIB, of_card, steps  # noqa: E402
from tests.profile import few  # noqa: E402

CUBLAS = 65  # MiB on an H100, taken by the first product
GPT2 = "gpt2_small:batch=4,seq=1024"
CASES: list[dict[str, Any]] = [{"model": GPT2, "adam": True}, {"model": GPT2}]
CASES += [{"model": "torchvision mobilenet_v2:batch=32"}]


def built(name: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    with torch.device("meta"):
        if name.startswith("torchvision "):
            import torchvision

            kind, _, batch = name.removeprefix("torchvision ").partition(":batch=")
            images = torch.zeros(int(batch), 3, 224, 224)
            return getattr(torchvision.models, kind)(), images, torch.zeros(int(batch), dtype=torch.int64)
        import torch_gpu

        return torch_gpu.build(name)


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, -2) if y.dim() == 3 else y, target)


@pytest.mark.parametrize("wanted", few(CASES, (0,)), ids=str)
def test_beside_an_h100(wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    module, x, target = built(wanted["model"])
    make = torch.optim.Adam if wanted.get("adam") else lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)
    # Depth-wise convolutions and 1 × 1 ones take no workspace worth a word.
    eager = fp.eager_memory(
        module, x, loss=loss_of, loss_inputs=target, optimizer=make, target="cuda", variant={"workspace": 0}
    )
    found = zip(eager.phases[2:], eager.replayed[2:], steps(of_card(**wanted))[2:], strict=True)
    for phase, card, measured in found:
        assert card.allocated / MIB + CUBLAS == pytest.approx(measured["live"], abs=2), phase
        assert card.most_allocated / MIB + CUBLAS == pytest.approx(measured["most_live"], abs=2), phase
    assert eager.replayed[-1].reserved / MIB + CUBLAS == pytest.approx(measured["reserved"], rel=0.002)
    sys.modules.pop("torch_gpu", None)
