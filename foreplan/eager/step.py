"""A training step as eager PyTorch runs it, three times in a row, and its bytes phase by phase."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from foreplan.eager.autocast import Autocast
from foreplan.eager.autograd import UINT8, Tape
from foreplan.eager.ddp import buckets
from foreplan.eager.forward import Run
from foreplan.eager.loss_calls import LOSSES, loss_call_of
from foreplan.eager.modules import Module
from foreplan.eager.optimizers import Stepper, not_counted, rule_of
from foreplan.eager.result import Eager, Phase
from foreplan.eager.rules.elementwise import unary
from foreplan.eager.storage import Memory, Tensor, Use
from foreplan.eager.variant import Variant
from foreplan.eager.workspace import Workspaces
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Graph, Kind, Value
from foreplan.graph.ir import live_nodes
from foreplan.graph.types import DTYPES, INT64, DType, Shape

ITERATIONS = 3
TRACKED = ".num_batches_tracked"
NARROW = {"bf16": DTYPES["bfloat16"]}
CUBLAS = "the workspace of cuBLAS is not counted"
_USES = {Kind.PARAMETER: Use.PARAMETER, Kind.FROZEN: Use.PARAMETER}


def as_pytorch(
    graph: Graph,
    loss: Any,
    optimizer: Any,
    variant: Variant,
    cuda: bool = False,
    *,
    accumulate: int = 1,
    precision: str = "float32",
    workspaces: Workspaces | None = None,
    watched: bool = False,
) -> Eager:
    """Three training steps of a model in eager PyTorch; its forward pass where there is no loss.

    Args:
        graph: the model, as it was traced or imported.
        loss, optimizer: as `compile` takes them.
        cuda: whether it runs on a card.
        accumulate: forward and backward passes in a step, each of a batch as the model's; the loss is divided by it.
        precision: float32; or bf16, within whose `torch.autocast` forward pass and loss run.
        workspaces: what convolutions take; None: what the variant says, where no library can be asked.
        watched: as a `TorchDispatchMode` sees it, beside which PyTorch sums gradients in new tensors.

    Raises:
        UnsupportedError: an op whose memory in PyTorch is not known here; names the node.
        UsageError: PyTorch has no such optimizer.
    """
    tape = Tape(cuda=cuda, sums_in_place=not watched, keeps=variant.gradients == "kept")
    if precision != "float32":
        tape.autocast = Autocast(NARROW[precision], cuda)
    tape.workspaces = workspaces or Workspaces(variant.limit)
    return _Loop(graph, loss, optimizer, variant, tape, accumulate).run()


def _of_results(graph: Graph) -> Graph:
    """The graph without what gives neither outputs nor the loss: PyTorch's ops update what they keep by themselves."""
    results = [*graph.outputs.values(), *(() if graph.loss is None else (graph.loss,))]
    nodes = live_nodes(graph, results)
    read = {value for node in nodes for value in node.inputs}.union(results)
    stored = tuple(value for value in graph.stored if value.kind is not Kind.CONSTANT or value in read)
    return replace(graph, nodes=nodes, stored=stored, updates={})


class _Loop:
    """The user's program."""

    def __init__(self, graph: Graph, loss: Any, optimizer: Any, variant: Variant, tape: Tape, accumulate: int) -> None:
        self.variant, self.optimizer, self.tape, self.accumulate = variant, optimizer, tape, accumulate
        graph, self.loss = loss_call_of(graph if loss is None else attach_loss(graph, loss))
        graph = _of_results(graph)
        self.module = Module.of(graph, variant.relu == "in_place", variant.checkpoint, variant.attention, variant.gelu)
        self.phases: list[Phase] = []
        self.kept: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.results: dict[Value, Tensor] = {}

    @property
    def trains(self) -> bool:
        """Whether there is something to minimise, and history is kept."""
        return self.variant.grad != "off" and (self.loss is not None or self.module.graph.loss is not None)

    def run(self) -> Eager:
        """All iterations."""
        graph, tape = self.module.graph, self.tape
        tape.records = self.trains
        inputs = self.made(graph.inputs, Use.INPUT)
        target = self.target()
        self.mark("inputs", 0)
        stored = self.made(graph.stored, Use.BUFFER)
        norms = [node for node in graph.nodes if node.op.name == "batch_norm"]
        there = sum(value.name.endswith(TRACKED) for value in graph.stored)  # a graph of a module has them by itself
        tracked = [self.one(f"{node.name}{TRACKED}", (), INT64, Use.BUFFER) for node in norms[there:]]
        parameters = [tensor for value, tensor in stored.items() if value.kind is Kind.PARAMETER]
        if self.trains and self.variant.parallel == "ddp":
            sizes = buckets((math.prod(each.shape) * each.dtype.itemsize, each.dtype.name) for each in parameters)
            tracked += [self.one("bucket", (nbytes,), UINT8, Use.BUCKET) for nbytes in sizes]
        self.mark("model", 0)
        for parameter in parameters:
            parameter.trained = True
        stepper = None
        if self.trains and self.optimizer is not None and self.variant.grad == "on":
            foreach = {"auto": tape.cuda, "foreach": True, "fused": True, "loop": False}[self.variant.optimizer]
            stepper = Stepper(tape, rule_of(self.optimizer), parameters, foreach)
        tape.memory.use = Use.ACTIVATION
        for iteration in range(1, ITERATIONS + 1):
            self.iteration(iteration, stepper, stored, inputs, target)
        memory = Memory(list(tape.memory.blocks), tape.memory.events[: self.phases[-1].end])
        del tracked
        notes = (*tape.workspaces.notes, CUBLAS) if tape.cuda else ()
        notes += not_counted(self.optimizer)
        return Eager(tuple(self.phases), memory, self.variant, tape.cuda, notes)

    def iteration(
        self,
        number: int,
        stepper: Stepper | None,
        stored: Mapping[Value, Tensor],
        inputs: Mapping[Value, Tensor],
        target: Tensor | None,
    ) -> None:
        """One turn of the loop."""
        if stepper is not None:
            stepper.zero_grad(self.variant.zero == "none")
            self.tape.memory.mark()
        for call in range(self.accumulate):
            with self.tape.casting():
                loss = self.forward(stored, inputs, target)
            if call == 0:
                self.mark("forward", number)
            if loss is None or not self.trains:
                return
            if self.variant.grad != "on":
                continue
            if self.accumulate > 1:
                loss = unary(self.tape, "div_scalar", loss)
            self.tape.backward(loss)
            if call == 0:
                self.mark("backward", number)
        if self.accumulate > 1:
            self.mark("micro_batches", number)
        if stepper is not None:
            stepper.step()
            self.results.clear()
            self.mark("step", number)

    def forward(
        self, stored: Mapping[Value, Tensor], inputs: Mapping[Value, Tensor], target: Tensor | None
    ) -> Tensor | None:
        """The forward pass and the loss; the model's output is let go, if nobody keeps it."""
        keeps = self.variant.results == "kept"
        run = Run(self.tape, self.module, stored, self.trains, keeps)
        self.results = run.values if keeps else {}
        run.forward(inputs)
        graph = self.module.graph
        outputs = [run.values[value] for value in graph.outputs.values()]
        loss: Tensor | None
        if self.loss is not None:
            self.tape.memory.node = "loss"
            known = self.loss.loss
            x = run.values[graph.outputs[self.loss.output]]
            loss = LOSSES[type(known)](self.tape, known, x, target)
            del x
        else:
            loss = run.values[graph.loss] if graph.loss is not None else None
        self.tape.memory.node = ""
        if self.variant.output == "kept":
            self.outputs = outputs
        if self.variant.loss == "kept" and loss is not None:
            self.kept.append(loss)
        return loss

    def target(self) -> Tensor | None:
        """The further input of the loss."""
        if self.loss is None:
            return None
        types = self.loss.loss.inputs(self.module.graph.outputs[self.loss.output].type)
        found = [self.one(name, type.shape, type.dtype, Use.INPUT) for name, type in types.items()]
        return found[0] if found else None

    def made(self, values: Iterable[Value], use: Use) -> dict[Value, Tensor]:
        """Tensors of inputs or of stored values."""
        return {value: self.one(value.name, value.shape, value.dtype, _USES.get(value.kind, use)) for value in values}

    def one(self, name: str, shape: Shape, dtype: DType, use: Use) -> Tensor:
        """A tensor that the user makes."""
        self.tape.memory.use = use
        return self.tape.new(shape, dtype, name)

    def mark(self, name: str, iteration: int) -> None:
        """A phase has ended."""
        memory = self.tape.memory
        self.phases.append(Phase(name, iteration, memory.live, memory.mark(), len(memory.events)))
