"""Three training steps of a module, run by PyTorch, and the bytes of its storages phase by phase."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_iter

import foreplan.eager
from foreplan.base.errors import UnsupportedError, UsageError
from foreplan.eager.ddp import buckets
from foreplan.eager.result import Eager, Phase
from foreplan.eager.step import CUBLAS, ITERATIONS
from foreplan.eager.storage import Memory, Use
from foreplan.eager.variant import Variant
from foreplan.eager.watched.attention import attention_by
from foreplan.eager.watched.autocast import casts_of_weights
from foreplan.eager.watched.fake_tensors import CARD, FakeTensors, imagined_card, told_real
from foreplan.eager.watched.paths import Paths
from foreplan.eager.watched.ranks import sharded
from foreplan.eager.watched.recipe import LossOf, inputs_of, loss_of, optimizer_of
from foreplan.eager.watched.storage_tracker import StorageTracker
from foreplan.eager.workspace import Workspaces
from foreplan.frontend.losses import Loss

_ASKS = (DataDependentOutputException, DynamicOutputShapeException)
_DTYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Recipe:
    """How a module is trained.

    Attributes:
        example, kwargs: of one call of the module.
        loss: a function of its output and further inputs, or one that foreplan names; None: the output has it.
        loss_inputs: further inputs of the loss; None: they are made up for a loss that foreplan names.
        optimizer: a function from parameters to an optimizer, or one of foreplan's; None: gradients alone.
        precision: float32, or that of autocast.
        accumulate: calls of the module in a step.
        variant: the rest of what may differ.
        workspaces: what convolutions take on a card; None: it runs on a processor.
        real: whether real tensors are taken.
        ranks: how many processes share the parameters; of parts of the module by themselves.
        shard: names of these parts, or patterns.
    """

    example: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Any
    loss_inputs: tuple[Any, ...] | None
    optimizer: Any
    precision: str
    accumulate: int
    variant: Variant
    workspaces: Workspaces | None
    real: bool
    ranks: int = 1
    shard: tuple[str, ...] = ()

    @property
    def autocasts(self) -> torch.dtype | None:
        """The type of autocast; with shared parameters, gathered ones are narrow instead."""
        return None if self.shard else _DTYPES[self.precision]


def run(module: torch.nn.Module, recipe: Recipe, sums_in_place: bool = True) -> Eager:
    """Three training steps of a module; its forward pass where there is nothing to minimise.

    Raises:
        UnsupportedError: its code asks for a value that only a real step has, or runs an op of which PyTorch does not
            know what it gives; names the line.
        UsageError: this is no module, there is no loss, or an option is not for it.
    """
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"module: give a torch.nn.Module, not {type(module).__name__}")
    if recipe.real:
        return _Loop(module, recipe, None, sums_in_place).run()
    imagined = FakeTensors("cpu" if recipe.workspaces is None else imagined_card())
    with contextlib.ExitStack() as stack:
        for each in (imagined.mode, told_real(), imagined.module(module)):
            stack.enter_context(each)
        if recipe.shard:
            dtype = _DTYPES[recipe.precision]
            stack.enter_context(sharded(module, recipe.ranks, recipe.shard, dtype, imagined.device))
        return _Loop(module, recipe, imagined, sums_in_place).run()


@dataclass(eq=False)
class _Held:
    """What the user's variables hold."""

    losses: list[torch.Tensor] = field(default_factory=list)
    output: Any = None


class _Loop:
    """The user's program."""

    def __init__(
        self, module: torch.nn.Module, recipe: Recipe, imagined: FakeTensors | None, sums_in_place: bool
    ) -> None:
        self.module, self.recipe, self.variant = module, recipe, recipe.variant
        self.device = "cpu" if imagined is None else imagined.device
        self.example, self.kwargs = recipe.example, dict(recipe.kwargs)
        self.loss_inputs: Any = recipe.loss_inputs
        self.loss: LossOf | None = None
        named: type[Loss] | None = None
        if recipe.loss is not None:
            self.loss, named = loss_of(recipe.loss)
        if imagined is not None:
            self.example, self.kwargs = imagined.inputs((self.example, self.kwargs))
            self.loss_inputs = imagined.inputs(self.loss_inputs)
        self.named = named is not None
        self.memory, self.paths = Memory(), Paths(module)
        known = None if imagined is None else imagined.known
        if self.loss_inputs is None:
            follow = StorageTracker(Memory(), self.device, known, self.paths, sums_in_place=False)
            self.loss_inputs = () if named is None else self.made_up(named, follow)
        if imagined is not None:
            imagined.done()
        self.follow = StorageTracker(self.memory, self.device, known, self.paths, sums_in_place, recipe.workspaces)
        self.phases: list[Phase] = []
        self.held = _Held()

    def made_up(self, named: type[Loss], follow: StorageTracker) -> tuple[torch.Tensor, ...]:
        """Further inputs of a loss, of the form that the module's output has."""
        with torch.no_grad(), _of_values(self.module), follow:
            return inputs_of(named, _first(self.module(*self.example, **self.kwargs)))

    @property
    def trains(self) -> bool:
        """Whether history is kept."""
        return self.variant.grad != "off"

    def run(self) -> Eager:
        """All iterations."""
        was = self.module.training
        self.module.train(was or self.variant.grad == "on")
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(_of_values(self.module))
                stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code has no ops to see
                self.count_what_is_there()
                parameters = [each for each in self.module.parameters() if each.requires_grad]
                optimizer = self.optimizer(parameters)
                scaler = torch.amp.GradScaler(self.device) if self.recipe.precision == "fp16" else None
                if self.device != "cpu":
                    stack.enter_context(casts_of_weights())
                    stack.enter_context(attention_by(self.variant.attention))
                    stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # no thread of that device
                stack.enter_context(self.paths.noted())
                if self.recipe.shard:
                    stack.enter_context(self.follow.of_ranks())
                stack.enter_context(self.follow)
                stack.enter_context(torch.set_grad_enabled(self.trains))
                for iteration in range(1, ITERATIONS + 1):
                    self.iteration(iteration, parameters, optimizer, scaler)
                memory = Memory(list(self.memory.blocks), self.memory.events[: self.phases[-1].end])
        finally:
            self.module.train(was)
            if self.recipe.real:
                self.module.zero_grad()
        return Eager(tuple(self.phases), memory, self.variant, self.device != "cpu", self.notes())

    def notes(self) -> tuple[str, ...]:
        """What is not counted of a card, for people."""
        if self.recipe.workspaces is None:
            return ()
        recurrent = any(isinstance(part, torch.nn.RNNBase) for part in self.module.modules())
        cells = "recurrent layers are counted as PyTorch's own cells: what cuDNN keeps of them is not known here"
        return (*self.recipe.workspaces.notes, *((cells,) if recurrent else ()), CUBLAS)

    def count_what_is_there(self) -> None:
        """Inputs, and then the module's tensors."""
        self.memory.use = Use.INPUT
        for tensor in _tensors((self.example, self.kwargs, self.loss_inputs)):
            self.follow.count(tensor, "input")
        self.mark("inputs", 0)
        for use, named in (
            (Use.PARAMETER, self.module.named_parameters()),
            (Use.BUFFER, self.module.named_buffers()),
        ):
            self.memory.use = use
            for name, tensor in named:
                self.follow.count(tensor, name)
        if self.trains and self.variant.parallel == "ddp":
            self.memory.use = Use.BUCKET
            trained = [each for each in self.module.parameters() if each.requires_grad]
            for nbytes in buckets((each.nbytes, str(each.dtype)) for each in trained):
                self.memory.take(nbytes, "bucket")
        self.mark("model", 0)

    def optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
        """The optimizer, and the state that it makes at once."""
        if self.recipe.optimizer is None or self.variant.grad != "on":
            return None
        self.memory.use = Use.STATE
        with self.follow:
            optimizer = optimizer_of(self.recipe.optimizer)(parameters)
        how = self.variant.optimizer
        for group in optimizer.param_groups:
            if how == "auto":  # PyTorch itself does not take tensors without bytes all at once
                if self.device != "cpu" and group.get("foreach", True) is None and not group.get("fused"):
                    group["foreach"] = True
            elif "foreach" not in group or (how == "fused" and "fused" not in group):
                raise UsageError(f"optimizer={how}: {type(optimizer).__name__} has no such form: leave it out")
            else:
                group.update(foreach=how == "foreach", fused=how == "fused")
        self.name_state(optimizer)
        return optimizer

    def iteration(
        self,
        number: int,
        parameters: list[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        """One turn of the loop."""
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=self.variant.zero == "none")
            self.memory.mark()
        for call in range(self.recipe.accumulate):
            loss = self.forward()
            if call == 0:
                self.mark("forward", number)
            if self.variant.grad != "on" or loss is None:
                return
            self.backward(loss, parameters, scaler)
            if call == 0:
                self.mark("backward", number)
        if self.recipe.accumulate > 1:
            self.mark("micro_batches", number)
        if optimizer is None:
            return
        self.memory.use = Use.TEMPORARY
        if scaler is None:
            optimizer.step()
        else:
            with contextlib.nullcontext() if self.follow.known is None else self.follow.known.all_finite():
                scaler.step(optimizer)
                scaler.update()
        self.name_state(optimizer)
        self.memory.use = Use.ACTIVATION
        self.mark("step", number)

    def forward(self) -> torch.Tensor | None:
        """The module and the loss; the module's output is let go, if nobody keeps it."""
        self.memory.use = Use.ACTIVATION
        dtype = self.recipe.autocasts
        with torch.autocast(self.device, dtype) if dtype else contextlib.nullcontext():
            output = self.module(*self.example, **self.kwargs)
            if self.variant.output == "kept":
                self.held.output = output
            loss = self.loss_of(output)
            del output
        if loss is not None and self.variant.loss == "kept":
            self.held.losses.append(loss)
        if loss is not None and self.recipe.accumulate > 1:
            loss = loss / self.recipe.accumulate
        return loss

    def loss_of(self, output: Any) -> torch.Tensor | None:
        """What is minimised."""
        if self.loss is not None:
            return self.loss(_first(output) if self.named else output, *self.loss_inputs)
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if found is None and self.variant.grad == "on":
            raise UsageError(
                f"{type(self.module).__name__} gives no loss: give loss=, a function of its output, or labels among "
                "its inputs; variant={'grad': 'off'} counts a forward pass alone"
            )
        return found

    def backward(
        self, loss: torch.Tensor, parameters: list[torch.nn.Parameter], scaler: torch.amp.GradScaler | None
    ) -> None:
        """Gradients, under the names of their parameters."""
        self.memory.use = Use.GRADIENT
        if scaler is not None:
            loss = scaler.scale(loss)
        with self.follow.backward(loss):
            loss.backward()
        for parameter in parameters:
            if parameter.grad is not None:
                self.follow.call(parameter.grad, Use.PARAMETER_GRADIENT, f"{self.follow.name(parameter)}.grad")

    def name_state(self, optimizer: torch.optim.Optimizer) -> None:
        """What an optimizer keeps for parameters."""
        for parameter, kept in optimizer.state.items():
            for name, value in kept.items() if isinstance(kept, dict) else ():
                for tensor in _plain(value):
                    self.memory.use = Use.STATE
                    self.follow.count(tensor, name)
                    self.follow.call(tensor, Use.STATE, f"{self.follow.name(parameter)}: {name}")

    def mark(self, name: str, iteration: int) -> None:
        """A phase has ended."""
        memory = self.memory
        self.phases.append(Phase(name, iteration, memory.live, memory.mark(), len(memory.events)))


def _tensors(nest: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_iter(nest) if isinstance(each, torch.Tensor))


def _plain(value: Any) -> Iterator[torch.Tensor]:
    """A tensor; or those that one is made of, such as the numbers and scales of an optimizer's state in 8 bits."""
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__") and not hasattr(value, "_local_tensor"):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def _first(output: Any) -> torch.Tensor:
    """The tensor of an output that a loss which foreplan names reads: its logits, or the first."""
    if isinstance(output, Mapping) and isinstance(output.get("logits"), torch.Tensor):
        return output["logits"]
    found = next(_tensors(dict(output) if isinstance(output, Mapping) else output), None)
    if found is None:
        raise UsageError("the module gives no tensor: give loss=, a function of its output")
    return found


@contextlib.contextmanager
def _of_values(module: torch.nn.Module) -> Iterator[None]:
    """Name the user's line where code asks for a value that tensors without bytes do not have."""
    try:
        yield
    except UnsupportedOperatorException as error:
        raise UnsupportedError(
            f"{_line(error)}of the op {error.func} PyTorch does not know what it gives: register_fake of torch.library "
            "tells it, and real=True runs the op itself"
        ) from error
    except NotImplementedError as error:
        if CARD not in str(error):
            raise
        raise UnsupportedError(
            f"{_line(error)}PyTorch has no way to run this on a card that is not here; target='cpu' counts the step "
            "on a processor"
        ) from error
    except RuntimeError as error:
        if not isinstance(error, _ASKS) and ".numpy() is not supported" not in str(error):
            raise
        raise UnsupportedError(
            f"{_line(error)}the code of {type(module).__name__} asks for a value that depends on weights, which only "
            "a real step has: real=True runs one, and takes its memory and its time"
        ) from error


def _line(error: BaseException) -> str:
    """The last line of a stack that is neither PyTorch's nor foreplan's."""
    frames: Iterable[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    own = (os.path.dirname(torch.__file__), os.path.dirname(foreplan.eager.__file__))
    outside = [frame for frame in frames if not frame.filename.startswith(own)]
    return f"{outside[-1].filename}:{outside[-1].lineno}: " if outside else ""
