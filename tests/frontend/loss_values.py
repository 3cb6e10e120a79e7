"""The value of a loss and its gradients with respect to the outputs that it reads, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import foreplan as fp
from foreplan.graph import Graph


def model_of(outputs: Sequence[np.ndarray], end: Callable[..., Any] = lambda x: x) -> Graph:
    """A model whose outputs are its parameters, each after a last function."""

    def model() -> dict[str, Any]:
        return {f"y{i}": end(fp.nn.parameter(f"p{i}", x.shape)) for i, x in enumerate(outputs)}

    return fp.trace(model, name="outputs")


def of_loss(
    loss: Any,
    outputs: Sequence[np.ndarray],
    further: Mapping[str, np.ndarray],
    end: Callable[..., Any] = lambda x: x,
    **options: Any,
) -> tuple[float, list[np.ndarray]]:
    """By a step that returns gradients.

    Args:
        end: what the model's outputs are of its parameters.
        options: of `compile`.
    """
    session = fp.compile(model_of(outputs, end), loss, **options).bind()
    for i, x in enumerate(outputs):
        session.parameters[f"p{i}"] = x.astype(np.float32)
    inputs = {slot.name: slot.operand.type.dtype.numpy for slot in session.program.inputs}
    result = session.step({name: x.astype(inputs[name]) for name, x in further.items()})
    assert result.loss is not None
    return result.loss, [result.gradients[f"p{i}"] for i in range(len(outputs))]
