"""Autograd as PyTorch runs it: what forward saves, and the engine that walks backward.

References: `torch/csrc/autograd/engine.cpp`, `input_buffer.cpp`, `functions/accumulate_grad.h` of PyTorch 2.13.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foreplan.eager.autocast import Autocast
from foreplan.eager.storage import Memory, Storage, Tensor, Use, dense_strides, strides_like
from foreplan.eager.workspace import Workspaces
from foreplan.graph.types import DTYPES, FLOAT32, DType, Shape, TensorType
from foreplan.ops.conv.common import ConvOp

Grads = Sequence[Tensor | None]
Saved = tuple[Tensor | None, ...]
Needs = tuple[bool, ...]
Backward = Callable[["Tape", Saved, Needs, Grads], Grads]  # saved, which gradients are asked, gradients of the results
UINT8 = DTYPES["uint8"]
LAST = math.inf  # the sequence number of what adds a gradient to a parameter: it runs as soon as it can


def only(grads: Grads) -> Tensor:
    """The gradient of the only result."""
    (grad,) = grads
    assert grad is not None
    return grad


class AllRecomputed(Exception):
    """A segment has made again all that was saved in it: PyTorch ends its forward pass there."""


@dataclass(eq=False, slots=True)
class Recomputed:
    """A segment within `torch.utils.checkpoint` (not reentrant): what is saved there is made again when it is needed.

    Attributes:
        run: its forward pass, once more.
        count: how many functions have saved something in it.
        saved: what they have saved, when it has run again; None before.
    """

    run: Callable[[], None]
    count: int = 0
    saved: list[Saved] | None = None

    def keep(self, saved: Saved) -> int:
        """Drop what a function saves, and count it; or keep it, when the segment runs again. Gives its number."""
        if self.saved is None:
            self.count += 1
            return self.count - 1
        self.saved.append(saved)
        if len(self.saved) == self.count:
            raise AllRecomputed
        return len(self.saved) - 1

    def unpacked(self, tape: Tape, number: int) -> Saved:
        """What a function has saved."""
        if self.saved is None:
            self.saved = []
            before = tape.memory.use, tape.memory.node
            tape.records, tape.memory.use, tape.segment = True, Use.ACTIVATION, self
            with contextlib.suppress(AllRecomputed):
                self.run()
            tape.records, tape.segment = False, None
            tape.memory.use, tape.memory.node = before
        found, self.saved[number] = self.saved[number], ()
        return found


@dataclass(eq=False, slots=True)
class Function:
    """A node of the graph that autograd walks.

    Attributes:
        sequence: when it was made; the engine takes the youngest node that is ready.
        edges: what gets the gradient of each input: (function, which of its results), a parameter, or nobody.
        shapes: of each input; a gradient that was broadcast is summed to it.
        dtypes: of each input; a gradient of another type becomes one of this.
        results: how many results it has.
        saved: what it keeps for backward.
        backward: computes the gradients.
        node: of the model.
        again: the segment that makes what it saves again, and its number there.
    """

    sequence: int
    edges: tuple[tuple[Function, int] | Tensor | None, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[DType, ...]
    results: int
    saved: Saved
    backward: Backward
    node: str
    again: tuple[Recomputed, int] | None = None


@dataclass(eq=False, slots=True)
class Tape:
    """Where tensors are made, and what their history is written on.

    Attributes:
        memory: counts the bytes.
        cuda: whether this is a card; PyTorch takes other ops there in some places.
        records: whether history is kept; not so within `no_grad` and in the backward pass.
        sums_in_place: whether gradients, and some biases, are added in place where that can be. They are, except where
            a `TorchDispatchMode` looks on, which tests use.
        workspaces: what each convolution takes for its own duration.
        keeps: whether each gradient keeps its buffer until backward ends.
        kept: these.
        segment: the checkpointed segment that runs.
        autocast: the types that ops take, in narrow precision; None: those they are given.
    """

    memory: Memory = field(default_factory=Memory)
    cuda: bool = False
    records: bool = True
    sums_in_place: bool = True
    workspaces: Workspaces = field(default_factory=Workspaces)
    keeps: bool = False
    kept: list[Tensor] = field(default_factory=list)
    segment: Recomputed | None = None
    autocast: Autocast | None = None
    made: int = 0

    def new(self, shape: Shape, dtype: DType = FLOAT32, op: str = "", strides: Sequence[int] | None = None) -> Tensor:
        """A tensor with bytes of its own; dense if no strides are given."""
        storage = Storage(self.memory, math.prod(shape) * dtype.itemsize, op)
        return Tensor(storage, shape, dense_strides(shape) if strides is None else strides, dtype)

    def like(self, tensor: Tensor, op: str = "") -> Tensor:
        """A new tensor that lies as another does."""
        return self.new(tensor.shape, tensor.dtype, op, strides_like(tensor.shape, tensor))

    def convolve(self, op: ConvOp, inputs: Sequence[Tensor], output: Tensor, name: str, gradient: bool = False) -> None:
        """Take the workspace of a convolution, or of a gradient of one, and give it back."""
        types = [TensorType(each.dtype, each.shape) for each in (*inputs, output)]
        nbytes = self.workspaces.of(op, types[:-1], types[-1], gradient, self.memory.node)
        if nbytes:
            use, self.memory.use = self.memory.use, Use.WORKSPACE
            self.new((nbytes,), UINT8, f"workspace of {name}")
            self.memory.use = use

    def casting(self, runs: bool = True) -> contextlib.AbstractContextManager[None]:
        """While autocast runs, if there is one; or is turned off."""
        return contextlib.nullcontext() if self.autocast is None else self.autocast.region(runs)

    def record(
        self,
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        backward: Backward,
        saved: Saved = (),
    ) -> None:
        """Write an op into the history of its results, if a gradient flows to one of its inputs.

        Args:
            saved: what backward needs; results may be among them.
        """
        if not self.records or not any(each.needs_grad for each in inputs):
            return
        self.made += 1
        edges = tuple(each if each.trained else each.maker for each in inputs)
        kept = tuple(None if each is None else each.detached() for each in saved)
        shapes = tuple(each.shape for each in inputs)
        dtypes = tuple(each.dtype for each in inputs)
        function = Function(self.made, edges, shapes, dtypes, len(results), kept, backward, self.memory.node)
        if self.segment is not None and kept:
            function.again, function.saved = (self.segment, self.segment.keep(kept)), ()
        for i, result in enumerate(results):
            if result.dtype.is_float:
                result.maker = (function, i)

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`."""
        if loss.maker is None:
            return
        self.records, self.memory.use = False, Use.GRADIENT
        root = self.like(loss, "gradient of the loss")  # which the caller holds to the end
        root.held += 1
        _Engine(self, loss.maker[0]).run(loss.maker, root)
        self.records, self.memory.use = True, Use.ACTIVATION
        self.kept.clear()


class _Engine:
    """One walk backward."""

    def __init__(self, tape: Tape, root: Function) -> None:
        self.tape = tape
        self.waits: dict[Function | Tensor, int] = {}
        self.buffers: dict[Function | Tensor, list[Tensor | None]] = {}
        self.ready: list[tuple[float, int, Function | Tensor]] = []
        self.count = 0
        seen, todo = {root}, [root]
        while todo:
            for edge in todo.pop().edges:
                target = edge[0] if isinstance(edge, tuple) else edge
                if target is None:
                    continue
                self.waits[target] = self.waits.get(target, 0) + 1
                if isinstance(target, Function) and target not in seen:
                    seen.add(target)
                    todo.append(target)

    def run(self, root: tuple[Function, int], grad: Tensor) -> None:
        """From the loss to the parameters."""
        self.waits[root[0]] = 1
        self.deliver(root, grad)
        while self.ready:
            target = heapq.heappop(self.ready)[2]
            buffer = self.buffers.pop(target)
            if isinstance(target, Tensor):
                self.accumulate(target, buffer)
                continue
            outputs = self.called(target, buffer)
            target.saved = ()
            for i, edge in enumerate(target.edges):
                if edge is not None and self.deliver(edge, outputs[i]):
                    outputs[i] = None
            del outputs  # those that were added to others live until here

    def called(self, function: Function, buffer: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients of a function's inputs. Those of its results are free when they are known."""
        self.tape.memory.node = function.node
        needs = tuple(edge is not None for edge in function.edges)
        grads = list(buffer)
        for i, grad in enumerate(grads):
            if grad is not None:
                grad.held -= 1
                buffer[i] = None
                del grad
        outputs: list[Tensor | None] = []
        if any(grads):
            if function.again is not None:
                segment, number = function.again
                function.saved = segment.unpacked(self.tape, number)
                function.again = None
                del segment
            outputs = list(function.backward(self.tape, function.saved, needs, grads))
            for i, (shape, dtype) in enumerate(zip(function.shapes, function.dtypes)):
                output = outputs[i]
                if output is not None and output.shape != shape:
                    outputs[i] = output = summed_to(self.tape, output, shape)
                if output is not None and output.dtype != dtype:
                    outputs[i] = self.tape.new(shape, dtype, f"to {dtype}", strides_like(shape, output))
                del output
        return outputs or [None] * len(needs)

    def deliver(self, edge: tuple[Function, int] | Tensor, grad: Tensor | None) -> bool:
        """Put a gradient into a buffer, or add it to what is there; a target with all its gradients is ready. Says
        whether the buffer has it now.
        """
        target, place = edge if isinstance(edge, tuple) else (edge, 0)
        count = target.results if isinstance(target, Function) else 1
        buffer = self.buffers.setdefault(target, [None] * count)
        if grad is not None:
            if self.tape.keeps:
                self.tape.kept.append(grad)
            old = buffer[place]
            if old is None:
                grad.held += 1
                buffer[place] = grad
            else:
                old.held -= 1
                alone = old.held == 0 and old.storage.tensors == 1 and old.is_dense
                if not (alone and self.tape.sums_in_place):
                    buffer[place] = self.tape.new(
                        old.shape, old.dtype, "sum of gradients", strides_like(old.shape, old, grad)
                    )
                buffer[place].held += 1  # type: ignore[union-attr]
        self.waits[target] -= 1
        if not self.waits[target]:
            self.count += 1
            sequence = target.sequence if isinstance(target, Function) else LAST
            heapq.heappush(self.ready, (-sequence, self.count, target))
        return grad is not None and buffer[place] is grad

    def accumulate(self, parameter: Tensor, buffer: list[Tensor | None]) -> None:
        """Make a gradient the parameter's, or add it to the one that is kept."""
        grad = buffer[0]
        if grad is None:
            return
        grad.held -= 1
        buffer[0] = None
        memory = self.tape.memory
        if parameter.grad is None:
            as_parameter = grad.strides == parameter.strides or (grad.is_contiguous and parameter.is_contiguous)
            if grad.held or not as_parameter:
                grad = self.tape.new(parameter.shape, parameter.dtype, "copy of the gradient", parameter.strides)
            parameter.grad = grad.detached()
            name = memory.blocks[parameter.storage.index].name
            memory.call(parameter.grad.storage.index, Use.PARAMETER_GRADIENT, f"{name}.grad")


def summed_to(tape: Tape, tensor: Tensor, shape: Shape) -> Tensor:
    """The sum of a gradient over the axes that were broadcast (`at::sum_to`)."""
    lead = tensor.rank - len(shape)
    extents = tuple(1 if i < lead or shape[i - lead] == 1 else extent for i, extent in enumerate(tensor.shape))
    if extents == tensor.shape:
        return tensor.viewed(shape, tensor.strides[lead:])
    return tape.new(extents, tensor.dtype, "sum").viewed(shape, dense_strides(shape))
