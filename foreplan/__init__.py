"""foreplan: compile a whole training step, look at its memory plan, then run it.

    graph = foreplan.from_onnx("model.onnx", batch=32)
    step = foreplan.compile(graph, loss=foreplan.losses.cross_entropy, optimizer=foreplan.optim.Nesterov(0.1))
    print(step.memory)
    session = step.bind()
    result = session.step({"x": images, "target": labels})

Names are imported when they are first used, so that `import foreplan` costs next to nothing. So are the other parts of
the package, such as `foreplan.planner` and `foreplan.graph`: none has to be imported by itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from foreplan.base.errors import (
    DoesNotFitError,
    ForeplanError,
    InputError,
    ModelError,
    PlanError,
    SessionError,
    ShapeError,
    TargetError,
    TraceError,
    UnsupportedError,
    UsageError,
    ValueNeededError,
    VerificationError,
)
from foreplan.version import VERSION

if TYPE_CHECKING:
    from foreplan import models, planner
    from foreplan.compiler.api import compile, differentiate, evaluation, inference, micro_batches
    from foreplan.compiler.compiled import Compiled, load_plan
    from foreplan.compiler.modules import from_torch
    from foreplan.compiler.planning import plan
    from foreplan.compiler.step_graphs import lower
    from foreplan.eager.at_hand import eager_memory
    from foreplan.frontend import from_onnx, losses, metrics, nn, scan, spec, trace
    from foreplan.frontend.nn import custom_gradient, gradient, stop_gradient, straight_through
    from foreplan.passes import optimizer as optim
    from foreplan.passes.choose_trained import frozen
    from foreplan.passes.lora import lora
    from foreplan.planner.verify.verifier import verify

__version__ = VERSION

_HOME = {
    "Compiled": "foreplan.compiler.compiled",
    "compile": "foreplan.compiler.api",
    "differentiate": "foreplan.compiler.api",
    "eager_memory": "foreplan.eager.at_hand",
    "evaluation": "foreplan.compiler.api",
    "frozen": "foreplan.passes.choose_trained",
    "inference": "foreplan.compiler.api",
    "load_plan": "foreplan.compiler.compiled",
    "lora": "foreplan.passes.lora",
    "micro_batches": "foreplan.compiler.api",
    "plan": "foreplan.compiler.planning",
    "verify": "foreplan.planner",
    "from_onnx": "foreplan.frontend",
    "from_torch": "foreplan.compiler.modules",
    "custom_gradient": "foreplan.frontend.nn",
    "gradient": "foreplan.frontend.nn",
    "stop_gradient": "foreplan.frontend.nn",
    "straight_through": "foreplan.frontend.nn",
    "scan": "foreplan.frontend",
    "spec": "foreplan.frontend",
    "trace": "foreplan.frontend",
}
_MODULES = {
    "errors": "foreplan.base.errors",
    "losses": "foreplan.frontend.losses",
    "lower": "foreplan.lower",
    "metrics": "foreplan.frontend.metrics",
    "models": "foreplan.models",
    "nn": "foreplan.frontend.nn",
    "optim": "foreplan.passes.optimizer",
    "planner": "foreplan.planner",
}

__all__ = [
    "Compiled",
    "DoesNotFitError",
    "ForeplanError",
    "InputError",
    "ModelError",
    "PlanError",
    "SessionError",
    "ShapeError",
    "TargetError",
    "TraceError",
    "UnsupportedError",
    "UsageError",
    "ValueNeededError",
    "VerificationError",
    "compile",
    "custom_gradient",
    "differentiate",
    "eager_memory",
    "evaluation",
    "from_onnx",
    "from_torch",
    "frozen",
    "gradient",
    "inference",
    "load_plan",
    "lora",
    "losses",
    "lower",
    "metrics",
    "micro_batches",
    "models",
    "nn",
    "optim",
    "plan",
    "planner",
    "scan",
    "spec",
    "stop_gradient",
    "straight_through",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        found: Any = getattr(importlib.import_module(_HOME[name]), name)
    else:
        found = _module(name)
    globals()[name] = found
    return found


def _module(name: str) -> Any:
    """A part of the package."""
    whole = _MODULES.get(name, f"foreplan.{name}")
    try:
        if not name.startswith("_"):
            return importlib.import_module(whole)
    except ModuleNotFoundError as error:
        if error.name != whole:
            raise
    raise AttributeError(f"module 'foreplan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
