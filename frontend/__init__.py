"""Models from outside: traced functions and ONNX files. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreplan.frontend import losses, nn
    from foreplan.frontend.onnx import from_onnx
    from foreplan.frontend.specs import Spec, spec
    from foreplan.frontend.tensor import Tensor
    from foreplan.frontend.tracing import trace

_HOME = {
    "Spec": "specs",
    "Tensor": "tensor",
    "from_onnx": "onnx",
    "losses": "losses",
    "nn": "nn",
    "spec": "specs",
    "trace": "tracing",
}

__all__ = ["Spec", "Tensor", "from_onnx", "losses", "nn", "spec", "trace"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'foreplan.frontend' has no attribute {name!r}")
    module = importlib.import_module(f"foreplan.frontend.{_HOME[name]}")
    found = module if _HOME[name] == name else getattr(module, name)
    globals()[name] = found
    return found
