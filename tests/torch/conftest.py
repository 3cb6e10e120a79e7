"""Modules are imported unchecked, where nothing is said: most tests hold them against PyTorch themselves.

PyTorch has one thread. And torchvision, which references for the zoo import, is there beside a PyTorch that its
operators were not built for.
"""

from __future__ import annotations

import importlib.util

import pytest

from foreplan.compiler import modules

if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)
    if importlib.util.find_spec("torchvision") is not None:
        try:
            import torchvision  # noqa: F401
        except RuntimeError:  # its operators for detection are not there; no test calls them: declared is enough
            taken = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", taken)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test says `check=True`."""
    monkeypatch.setattr(modules, "MOST_CHECKED", 0)
