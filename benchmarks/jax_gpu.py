"""Training steps of the zoo in JAX: a model's graph run by JAX's own ops, its gradients by jax.grad, all compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from foreplan import lower, models, passes
from foreplan.frontend.losses import attach_loss
from foreplan.graph.init import generator_for
from foreplan.runtime.inputs import made_up
from tests.oracle.jax_graph import run

PRECISIONS = {"float32": "highest", "tf32": "tensorfloat32", "bf16": "default"}
RATE, MOMENTUM = 1e-4, 0.9


def stepper(name: str, precision: str) -> Callable[[int], float]:
    """A function that runs a number of steps, waits for them, and returns the last one's loss.

    In bf16 all is narrow but what is updated.
    """
    jax.config.update("jax_default_matmul_precision", PRECISIONS[precision])
    graph = attach_loss(models.build(name), models.default_loss(name))
    graph = passes.training_form(passes.SelectOutputs([])(graph))
    stored: dict[str, Any] = {}
    for value in graph.stored:
        array = np.empty(value.shape, value.dtype.numpy)
        assert value.init is not None
        value.init.fill(array, generator_for(0, value.name))
        stored[value.name] = jnp.asarray(array)
    trained = {value.name: stored.pop(value.name) for value in graph.parameters}
    inputs = {key: jnp.asarray(array) for key, array in made_up(lower(graph)).items()}

    def narrow(array: Any) -> Any:
        is_wide = precision == "bf16" and jnp.issubdtype(array.dtype, jnp.floating)
        return array.astype(jnp.bfloat16) if is_wide else array

    def loss(parameters: Any, given: Any) -> Any:
        seen = {key: narrow(array) for key, array in (stored | parameters).items()}
        return run(graph, {key: narrow(array) for key, array in given.items()}, seen)[graph.loss].astype(jnp.float32)

    def update(parameters: Any, velocity: Any, given: Any) -> Any:
        found, gradients = jax.value_and_grad(loss)(parameters, given)
        velocity = {key: MOMENTUM * v + gradients[key] for key, v in velocity.items()}
        moved = {key: p - RATE * (gradients[key] + MOMENTUM * velocity[key]) for key, p in parameters.items()}
        return moved, velocity, found

    compiled = jax.jit(update, donate_argnums=(0, 1))
    state = [trained, {key: jnp.zeros_like(array) for key, array in trained.items()}]

    def steps(count: int) -> float:
        for _ in range(count):
            state[0], state[1], found = compiled(*state, inputs)
        jax.block_until_ready(state)
        return float(found)

    return steps
