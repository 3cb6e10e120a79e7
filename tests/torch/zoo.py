"""A model of the zoo beside its reference implementation: the same weights and inputs, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import foreplan as fp
from foreplan.graph import Graph

OUTPUTS, GRADIENTS = 1e-4, 1e-3  # limits of errors, relative to the largest element
NEGLIGIBLE = 1e-4  # of the largest gradient of all: one that is 0 but for rounding, as that of a key's bias


def cross_entropy(logits: Any, target: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": cross_entropy,
    "mse": torch.nn.functional.mse_loss,
    "binary_cross_entropy": torch.nn.functional.binary_cross_entropy_with_logits,
}


def drawn(module: Any, seed: int = 0) -> Any:
    """The module with random weights that leave none at a special value: scales about 1, others about 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * (parameter.numel() / len(parameter)) ** -0.5)
            else:
                parameter.add_(0.2 * noise)
        for name, buffer in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(0.5 * torch.rand(buffer.shape, generator=generator))
    return module


def beside(
    graph: Graph,
    module: Any,
    call: Callable[..., Any],
    inputs: dict[str, np.ndarray],
    target: np.ndarray,
    folder: Path,
    loss: str = "cross_entropy",
    strict: bool = True,
) -> None:
    """`call(module, *inputs)` is the module's output; its weights reach the graph in a file, by name.

    Unless `strict`, the file may hold more than the graph has.
    """
    kept: dict[int, tuple[str, Any]] = {}
    for name, tensor in module.state_dict().items():
        kept.setdefault(tensor.data_ptr(), (name, tensor))  # a tied weight is in a file once
    save_file(dict(kept.values()), folder / "model.safetensors")
    tensors = [torch.from_numpy(x) for x in inputs.values()]
    expected = call(module.eval(), *tensors).detach().numpy()
    session = fp.compile(graph).bind()
    session.load(folder / "model.safetensors", strict=strict)
    (output,) = session.step(inputs).outputs.values()
    close(output, expected, OUTPUTS, "output")
    wanted_loss = LOSSES[loss](call(module.train(), *tensors), torch.from_numpy(target))
    wanted_loss.backward()
    session = fp.compile(graph, loss=loss).bind()
    session.load(folder / "model.safetensors", strict=strict)
    result = session.step({**inputs, "target": target})
    assert abs(result.loss - wanted_loss.item()) <= OUTPUTS * abs(wanted_loss.item())
    wanted = {name: parameter.grad.numpy() for name, parameter in module.named_parameters()}
    assert set(result.gradients) == set(wanted)
    least = NEGLIGIBLE * max(np.abs(gradient).max() for gradient in wanted.values())
    for name, gradient in wanted.items():
        close(result.gradients[name], gradient, GRADIENTS, name, least)


def close(found: np.ndarray, expected: np.ndarray, limit: float, what: str, least: float = 0.0) -> None:
    """Equal within a limit relative to the largest element, or to `least`."""
    assert found.shape == expected.shape, what
    error, largest = np.abs(found - expected).max(), max(np.abs(expected).max(), least)
    assert error <= limit * largest, f"{what}: error {error:g}, largest {largest:g}"
