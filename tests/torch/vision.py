"""torchvision, whose models are references for those of the zoo."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def torchvision_models() -> Any:
    """`torchvision.models`; without it, the test is skipped.

    A torchvision that is built for another PyTorch lacks its operators for detection and is not imported. The models
    call none of them: to declare them is enough.
    """
    try:
        return pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return pytest.importorskip("torchvision.models")
