"""Models from outside become graphs here, and only here.

    onnx/       `from_onnx`: an ONNX file → Graph; one translation for each ONNX op
    torch/      a PyTorch module → Graph, which `foreplan.from_torch` holds against PyTorch
    tracing/    `trace`: a Python function over NumPy-style arrays → Graph; `Tensor`, `Spec` and `scan`
    nn/         layers and functions of neural networks, for traced functions
    losses/     losses, as traced functions that are added to a finished model
    metrics.py  metrics, likewise
    evaluation.py  a model whose outputs are its loss and metrics

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreplan.frontend import losses, metrics, nn
    from foreplan.frontend.onnx import from_onnx
    from foreplan.frontend.tracing import Spec, Tensor, scan, spec, trace

_HOME = {
    "Spec": "tracing",
    "Tensor": "tracing",
    "from_onnx": "onnx",
    "scan": "tracing",
    "spec": "tracing",
    "trace": "tracing",
}
_MODULES = ("losses", "metrics", "nn")

__all__ = ["Spec", "Tensor", "from_onnx", "losses", "metrics", "nn", "scan", "spec", "trace"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found: Any = importlib.import_module(f"foreplan.frontend.{name}")
    elif name in _HOME:
        found = getattr(importlib.import_module(f"foreplan.frontend.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'foreplan.frontend' has no attribute {name!r}")
    globals()[name] = found
    return found
