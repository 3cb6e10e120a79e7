"""A module with numbers that say where they come from, and the four forms of file that PyTorch makes of it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from tests.torch.modules import MODULES

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Example:
    """A module in training mode, without dropout, and its inputs.

    All numbers of its parameters differ, so that a file's tensor, whatever its name and its layout, tells by each of
    its elements which parameter it is of.
    """

    name: str
    module: nn.Module
    inputs: Inputs
    fresh: bool = False

    def copy(self, training: bool) -> nn.Module:
        """The module made again, in a mode: what a run changes of it changes nothing here."""
        module = example(self.name, self.fresh).module
        with torch.no_grad():
            for parameter, own in zip(module.parameters(), self.module.parameters()):
                parameter.copy_(own)
        return module.train(training)

    def perturbed(self, only: str = "") -> Example:
        """The same with other values of the trained parameters, or of one of them."""
        other = example(self.name, self.fresh)
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in other.module.named_parameters():
                if parameter.requires_grad and only in ("", name):
                    parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
        return other


def example(name: str, fresh: bool = False) -> Example:
    """The module of that name, the same at each call; fresh: with the first contents that PyTorch gives."""
    torch.manual_seed(zlib.crc32(name.encode()))
    with quiet():
        module, inputs = MODULES[name]()
    module.train()
    for part in module.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
        if isinstance(part, _BatchNorm) and not fresh:
            part.running_mean.normal_(0, 0.2)
            part.running_var.uniform_(0.7, 1.5)
    if not fresh:
        _make_all_differ(list(module.parameters()))
    return Example(name, module, inputs, fresh)


def _make_all_differ(parameters: list[nn.Parameter]) -> None:
    """First contents of zeros and of ones would hide what is learned, and exporters merge tensors that are equal."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter) * 0.05)
        while True:
            numbers = torch.cat([parameter.flatten() for parameter in parameters])
            _, place, count = numbers.unique(return_inverse=True, return_counts=True)
            again = (count[place] > 1) | (numbers == 0)
            if not again.any():
                return
            for parameter, there in zip(parameters, again.split([p.numel() for p in parameters])):
                there = there.view_as(parameter)
                parameter[there] += torch.randn_like(parameter[there]) * 0.01


def _dynamo(example: Example, path: Path, optimize: bool) -> None:
    program = torch.onnx.export(example.copy(True), example.inputs, dynamo=True, optimize=optimize, verbose=False)
    assert program is not None
    program.save(str(path))


def _torchscript(example: Example, path: Path) -> None:
    torch.onnx.export(example.copy(False), example.inputs, str(path), dynamo=False)


def _torchscript_training(example: Example, path: Path) -> None:
    torch.onnx.export(
        example.copy(True),
        example.inputs,
        str(path),
        dynamo=False,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
    )


FORMS: dict[str, Callable[[Example, Path], None]] = {
    "dynamo": lambda example, path: _dynamo(example, path, True),
    "dynamo, not optimized": lambda example, path: _dynamo(example, path, False),
    "torchscript": _torchscript,
    "torchscript, training": _torchscript_training,
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the exporters say to people."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
    logging.disable(before)


def export(example: Example, form: str, path: Path) -> str:
    """Write the file; where the exporter fails, the first line of its message."""
    try:
        with quiet():
            FORMS[form](example, path)
    except Exception as error:  # each kind of failure of another project's code is a result here
        return f"{type(error).__name__}: {_cause(error)}"
    return ""


def _cause(error: BaseException) -> str:
    """The line that says most: of the exception that began it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else ""
