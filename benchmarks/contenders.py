"""How each contender runs a net of `nets.py`: a step, its loss, and a sum over each of its weights."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RATE = 1e-3


@dataclass(frozen=True)
class Running:
    """A contender, ready to step.

    Attributes:
        step: gives the loss of a training step, or the outputs, in the contender's own type.
        number: a number of what a step gave: the loss, or the mean size of the outputs.
        sums: a checksum of each trained weight, by name; empty for inference.
    """

    step: Callable[[], Any]
    number: Callable[[Any], float]
    sums: Callable[[], Mapping[str, int]]


def prepare(name: str, folder: Path) -> None:
    """Files of a net for contenders that do not import PyTorch: a graph or an ONNX model, and arrays."""
    import torch
    from nets import NETS, built

    import foreplan as fp

    module, inputs, target = built(name)
    np.savez(folder / "arrays.npz", *(x.numpy() for x in inputs), target=target.numpy())
    net = NETS[name]
    (folder / "how").write_bytes(pickle.dumps({"train": net.train, "momentum": net.momentum, "budget": net.budget}))
    if net.train:
        (folder / "graph").write_bytes(pickle.dumps(fp.from_torch(module, *inputs)))
    else:
        torch.onnx.export(module.eval(), inputs, str(folder / "model.onnx"), dynamo=True, verbose=False)


def foreplan(folder: Path, threads: int, precision: str) -> Running:
    """Ours: training by the graph that `from_torch` made, inference from PyTorch's export."""
    import foreplan as fp

    how = pickle.loads((folder / "how").read_bytes())
    graph = pickle.loads((folder / "graph").read_bytes()) if how["train"] else fp.from_onnx(folder / "model.onnx")
    arrays = dict(np.load(folder / "arrays.npz"))
    target = arrays.pop("target")
    optimizer = fp.optim.Nesterov(RATE, momentum=how["momentum"]) if how["momentum"] else fp.optim.SGD(RATE)
    loss = "mse" if target.dtype.kind == "f" else "cross_entropy"
    trained = {"optimizer": optimizer, "loss": loss} if how["train"] else {}
    more = {"budget": how["budget"], "precision": precision, "prepack": not how["train"]}
    session = fp.compile(graph, target=f"cpu:threads={threads}", **trained, **more).bind()
    data = dict(zip((value.name for value in graph.inputs), arrays.values()))
    if not how["train"]:
        (output,) = graph.outputs
        return Running(lambda: session.step(data).outputs[output], _size, dict)
    data["target"] = target

    def sums() -> dict[str, int]:
        weights = session.state_dict()
        return {name: zlib.crc32(weights[name]) for name in names}

    names = [slot.name for slot in session.program.stored if slot.kind.value == "parameter"]
    return Running(lambda: session.step(data), lambda result: float(result.loss), sums)


def pytorch(name: str, form: str, threads: int) -> Running:
    """PyTorch's, as its users write them.

    Args:
        form: eager, channels_last, compile (torch.compile of the whole step: forward pass, backward pass and update in
            one; in inference its weights are frozen) or compile_channels_last.
    """
    import torch
    from nets import NETS, built
    from torch.nn import functional as F

    torch.set_num_threads(threads)
    net = NETS[name]
    module, inputs, target = built(name)
    if form.endswith("channels_last"):
        module = module.to(memory_format=torch.channels_last)
        inputs = tuple(x.to(memory_format=torch.channels_last) for x in inputs)
    compiled = form.startswith("compile")
    if compiled:
        from torch._dynamo import config as tracing
        from torch._inductor import config

        config.compile_threads = 1  # no processes of its own beside the contenders
        config.freezing = not net.train
        tracing.trace_autograd_ops = True  # else a training step falls apart where the backward pass begins
    if not net.train:
        run = torch.compile(module.eval()) if compiled else module.eval()

        @torch.inference_mode()
        def infer() -> Any:
            return run(*inputs)

        return Running(infer, lambda y: _size(y.numpy()), dict)
    parameters = dict(module.named_parameters())
    nesterov = {"momentum": net.momentum, "nesterov": True} if net.momentum else {}
    optimizer = torch.optim.SGD(parameters.values(), RATE, **nesterov)

    def step() -> Any:
        y = module(*inputs)
        loss = F.mse_loss(y, target) if target.is_floating_point() else F.cross_entropy(y, target)
        loss.backward()
        optimizer.step()
        for parameter in parameters.values():  # what `zero_grad` does, in a form that torch.compile takes
            parameter.grad = None
        return loss.detach()

    def sums() -> dict[str, int]:
        return {key: zlib.crc32(value.detach().contiguous().numpy()) for key, value in parameters.items()}

    return Running(torch.compile(step) if compiled else step, float, sums)


def onnxruntime(folder: Path, threads: int) -> Running:
    """ONNX Runtime, from PyTorch's export."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    arrays = dict(np.load(folder / "arrays.npz"))
    del arrays["target"]
    data = dict(zip((given.name for given in session.get_inputs()), arrays.values()))
    return Running(lambda: session.run(None, data)[0], _size, dict)


def _size(y: np.ndarray) -> float:
    return float(np.abs(y).mean())


def running(contender: str, name: str, folder: Path, threads: int) -> Running:
    """A contender by name: foreplan, perhaps with a precision behind it; onnxruntime; or a form of PyTorch's."""
    who, _, how = contender.partition(" ")
    if who == "foreplan":
        return foreplan(folder, threads, how or "float32")
    return onnxruntime(folder, threads) if who == "onnxruntime" else pytorch(name, how, threads)
