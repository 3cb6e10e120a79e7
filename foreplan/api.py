"""The front door: import → differentiate → lower → plan → bind; `compile` is all of them in a row."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan import passes
from foreplan.arguments import choice, flag, instance, names_in, path_of, whole
from foreplan.collection import without_collection
from foreplan.errors import DoesNotFitError, UsageError
from foreplan.graph import Graph
from foreplan.lower import WORKSPACE, Program, Target, lower
from foreplan.lower.prefetch import with_prefetch
from foreplan.lower.program import HOST
from foreplan.passes.optimizer import Optimizer
from foreplan.planner import Plan, Problem, Totals, totals
from foreplan.planner import plan as search
from foreplan.planner import verify as verify
from foreplan.units import format_bytes

if TYPE_CHECKING:
    from foreplan.lower.outside import Use
    from foreplan.runtime.session import Session
    from foreplan.runtime.update import Update
    from foreplan.views.memory import Memory

_MODEL = "make one with from_onnx(path), trace(function, *specs) or models.build(name)"
_BEFORE_TARGET = (passes.Stage.FORWARD, passes.Stage.MEMORY, passes.Stage.TRAINING)
_CHOOSES = "checkpoint says what is recomputed, and {} lets the planner choose: give one"


def differentiate(
    graph: Graph,
    loss: Any = None,
    optimizer: Optimizer | None = None,
    outputs: Iterable[str] = (),
    precision: str = "float32",
) -> Graph:
    """The whole training step of a model: forward, loss, backward and updates in one graph.

    Args:
        graph: a model in inference form.
        loss: one of `foreplan.losses`, or a traceable function of the model's outputs and of further inputs (its
            parameters with a `foreplan.spec` as default). None where the graph has a loss already.
        optimizer: one of `foreplan.optim`; None: the step returns gradients and updates no parameter.
        outputs: names of what a step returns beside the loss. An output that is returned must stay alive.
        precision: see `compile`.

    Raises:
        ModelError: nothing can be differentiated; names the node.
        UsageError: an output or a precision that does not exist.
    """
    settings = _training(graph, loss, optimizer, outputs, precision)
    with without_collection():
        return passes.run_passes(graph, settings, _BEFORE_TARGET)


def micro_batches(
    graph: Graph,
    loss: Any,
    optimizer: Optimizer | None,
    outputs: Iterable[str] = (),
    precision: str = "float32",
) -> tuple[Graph, Graph]:
    """A training step that accumulates the gradients of micro-batches, as two graphs of the same stored values.

    The first runs for each micro-batch: forward, loss and backward, which adds to gradients that are kept, and counts.
    The second runs once after them: updates with the mean gradients, which it then clears.

    Args:
        graph, loss, optimizer, outputs, precision: see `differentiate`; there must be an optimizer.

    Raises:
        ModelError, UsageError: see `differentiate`.
    """
    if optimizer is None or (loss is None and graph.loss is None):
        raise UsageError(
            "gradients are accumulated for an update: pass a loss and an optimizer, or leave accumulate out"
        )
    settings, accumulation = _training(graph, loss, optimizer, outputs, precision), passes.Accumulation()
    settings = replace(settings, consume=accumulation.consume, accumulation=accumulation)
    body = passes.run_passes(graph, settings, _BEFORE_TARGET)
    return passes.with_same_stored(body, passes.simplified(accumulation.update(body, optimizer)))


def _training(
    graph: Graph, loss: Any, optimizer: Optimizer | None, outputs: Iterable[str], precision: str
) -> passes.Settings:
    """What is asked of the passes, after checking what was given."""
    from foreplan.frontend.losses import attach_loss

    dtype = passes.narrow_type(precision)
    instance("a model", graph, Graph, _MODEL)
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "learning_rate")):
        raise UsageError(f"the optimizer must be one such as optim.Nesterov(0.1), and is {optimizer!r}")
    names = names_in("outputs", outputs)
    passes.select_outputs(graph, names)  # a wrong name is told before anything else is done
    return passes.Settings(
        outputs=tuple(names),
        attach=None if loss is None else partial(attach_loss, loss=loss),
        trains=True,
        consume=None if optimizer is None else passes.updating(optimizer),
        dtype=dtype,
    )


def inference(graph: Graph, outputs: Iterable[str] | None = None, precision: str = "float32") -> Graph:
    """The forward pass alone, simplified; attention is one op, and convolutions add up what they give of concatenated
    channels.

    Args:
        graph: a model in inference form.
        outputs: names of what a step returns; all of the model's outputs by default.
        precision: see `compile`.
    """
    dtype = passes.narrow_type(precision)
    instance("a model", graph, Graph, _MODEL)
    names = None if outputs is None else tuple(names_in("outputs", outputs))
    return passes.run_passes(graph, passes.Settings(names, dtype=dtype), _BEFORE_TARGET)


def plan(
    problem: Problem, budget: int | float | str | None = None, remat: str = "free", checkpoint: Iterable[str] = ()
) -> Plan:
    """The lowest plan found for a problem, verified: see `foreplan.planner.plan`.

    Args:
        budget, remat: see `foreplan.planner.plan`.
        checkpoint: segments of a program to recompute, and nothing else: see `compile`.

    Raises:
        DoesNotFitError: the budget cannot be met; shows the peak with its largest buffers, and what to try next.
        PlanError, UsageError: as the planner's own.
    """
    instance("what is planned", problem, Problem, "make one with lower(graph, target)")
    choice("remat", remat, ("off", "free", "auto"))
    if entries := names_in("checkpoint", checkpoint):
        if budget is not None:
            raise UsageError(_CHOOSES.format("a budget"))
        if not isinstance(problem, Program):
            raise UsageError("checkpoint names operations, and a problem has none: give what `lower` returns")
        if problem.copies:
            raise UsageError(_CHOOSES.format("offload"))
        from foreplan.segments import plan_checkpoints

        return plan_checkpoints(problem, entries)
    try:
        return search(problem, budget, remat)
    except DoesNotFitError as error:
        from foreplan.advice import explained

        raise explained(error, problem) from None


def compile(
    graph: Graph,
    loss: Any = None,
    optimizer: Optimizer | None = None,
    *,
    target: str | Target = "numpy",
    budget: int | float | str | None = None,
    remat: str = "free",
    outputs: Iterable[str] | None = None,
    checkpoint: Iterable[str] = (),
    accumulate: int = 1,
    offload: bool = False,
    prefetch: bool = False,
    precision: str = "float32",
    tune: bool = False,
    workspace: int | str = WORKSPACE,
) -> Compiled:
    """Compile a model and plan every byte of one step. Nothing is allocated.

    Args:
        graph: from `from_onnx`, `trace` or `models`.
        loss: see `differentiate`; None: inference.
        optimizer: see `differentiate`.
        target: the engine that will run it: "numpy" (the default), or "cpu" (oneDNN and compiled loops), on all cores
            or on so many as in "cpu:threads=2".
        budget: bytes that the arena must stay within: a number, a text such as "2GiB", or a ratio below 1 of the
            arena without a budget.
        remat: `off`, `free` or `auto`: what may be recomputed to save memory.
        outputs: names of what a step returns beside the loss.
        checkpoint: segments of the model to recompute by hand, as `torch.utils.checkpoint` does, instead of `budget`
            and `remat`: what a segment computes is dropped when the forward pass has left it, and computed once more
            for its backward pass; what it reads and what is read of it stays. Each entry is a scope such as "layer1",
            a pattern such as "h.*" (each scope that matches is a segment), or a range "conv2..conv5".
        accumulate: how many micro-batches a step takes one after the other, each of the graph's own batch, and adds
            the gradients of, before one update with their mean. That is a step on all samples at once, if the loss is a
            mean over as many samples in each, and no sample's depends on others (as batch norm makes it). More than 1:
            `Session.step` takes them all at once, along a further leading axis of every input without a default.
        offload: whether activations may be copied to host memory and back, where that takes less time than to compute
            them again, as the target's bus has it. Copies count as recomputation does, but for `remat="off"`, with
            which a budget is met by copies alone.
        prefetch: plan a second slot for every input without a default, into which a card copies the next batch while a
            step runs (`Session.steps`). It takes as many bytes as those inputs. Other targets run the same, and no
            faster for it.
        precision: "float32", or "bf16": images, hidden states and their gradients are bfloat16, which takes half the
            bytes, as is all that products and convolutions read; their sums are float32. Parameters, optimizer state,
            statistics, losses, inputs and whatever a step returns are float32 as ever. "fp16": the same in float16,
            whose gradients an optimizer gets scaled, by what no gradient overflows with.
        tune: price the target's kernels by measuring each once on this machine instead of predicting them: seconds the
            first time, and kept on disk. Plans then depend on what was measured.
        workspace: the most scratch memory that one action may have where another kernel for it needs less: bytes, a
            text such as "64MiB", or "unlimited"; "auto" is 64 MiB, and more where that is 1.5 times as fast. Kernels
            within it are chosen by time and by what room the peak leaves.

    Raises:
        DoesNotFitError: the budget cannot be met; says the least that can.
        ForeplanError: anything else that cannot be compiled; says what and where.
    """
    started = time.perf_counter()
    instance("a model", graph, Graph, _MODEL)
    accumulate = whole("accumulate", accumulate, 1)
    offload, prefetch, tune = flag("offload", offload), flag("prefetch", prefetch), flag("tune", tune)
    with without_collection():
        last = None
        if accumulate != 1:
            step, last = micro_batches(graph, loss, optimizer, outputs or (), precision)
        elif loss is None and graph.loss is None:
            if optimizer is not None:
                raise UsageError("an optimizer needs a loss to minimise: pass loss=, for example losses.cross_entropy")
            step = inference(graph, outputs, precision)
        else:
            step = differentiate(graph, loss, optimizer, outputs or (), precision)
        if offload and step.loss is None:
            raise UsageError("offload copies what the backward pass reads, and this is inference: give a loss")
        entries = names_in("checkpoint", checkpoint)
        if offload and entries:
            raise UsageError(_CHOOSES.format("offload"))
        program = lower(step, target, offload=offload, prefetch=prefetch, tune=tune, workspace=workspace)
        after = None if last is None else lower(last, target, offload=offload, tune=tune, workspace=workspace)
        if after is not None and prefetch:
            after = with_prefetch(after, program)
        try:
            planned = plan(program, budget=budget, remat=remat, checkpoint=entries)
        except DoesNotFitError as error:
            from foreplan.advice import of_halves

            raise of_halves(error, after) from None
        update = None
        if after is not None:  # within the budget of the first half; there is little in it to recompute
            from foreplan.runtime.update import Update

            found = plan(after, planned.budget, "off" if planned.budget is None else "auto")
            update = Update(accumulate, after, found)
        return Compiled(program, planned, step, time.perf_counter() - started, update)


@dataclass(frozen=True)
class Compiled:
    """A compiled step: its program and plan, ready to look at, to save and to bind.

    Attributes:
        program: the planner's problem, with what each action runs.
        plan: the answer, verified.
        graph: the whole step as a graph; None where the plan came from a file.
        plan_seconds: wall time from the model's graph to the verified plan.
        update: what runs after the micro-batches of a step that accumulates gradients, for each of which the program
            runs; None: the program is the whole step.
    """

    program: Program
    plan: Plan
    graph: Graph | None = None
    plan_seconds: float = 0.0
    update: Update | None = None

    @property
    def accumulate(self) -> int:
        """How many micro-batches a step takes; 1: the program is the whole step."""
        return 1 if self.update is None else self.update.micro_batches

    @property
    def arena_bytes(self) -> int:
        """Height of the one arena in which the whole step runs."""
        return self.highest[1].arena_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory for what the step copies there."""
        heights = self.plan.heights if self.update is None else self.update.heights(self.plan)
        return sum(heights[HOST:])

    @property
    def highest(self) -> tuple[Program, Plan]:
        """What needs the most memory: the program and its plan, or those of the update where they need more."""
        if self.update is None or self.update.plan.arena_bytes <= self.plan.arena_bytes:
            return self.program, self.plan
        return self.update.program, self.update.plan

    @property
    def memory(self) -> Memory:
        """Where the bytes are, in the half of the step that needs more of them where it has two: peak, bounds,
        categories, what is alive when, and what lies outside the arena.

        Raises:
            TargetError: what the user has measured outside arenas cannot be read.
        """
        from foreplan.views.memory import Memory

        return Memory.of(*self.highest, self._part, self._use)

    @property
    def _use(self) -> Use:
        """What a process does with the step, as it has done this far, besides its highest half."""
        from foreplan.lower.outside import Use, returned_bytes

        if self.update is None:
            return Use(compiles=self.graph is not None)
        program, plan = self.program, self.plan
        if self.highest[1] is plan:
            program, plan = self.update.program, self.update.plan
        returned = returned_bytes(self.program, self.accumulate)
        return Use(self.graph is not None, len(plan.steps), len(program.actions), returned)

    @property
    def _part(self) -> str:
        """Which part of a step `highest` is, for people."""
        if self.update is None:
            return ""
        body, update = format_bytes(self.plan.arena_bytes), format_bytes(self.update.plan.arena_bytes)
        if self.highest[1] is self.plan:
            return f"the body, run for each of {self.accumulate} micro-batches (the update after them needs {update})"
        return f"the update after {self.accumulate} micro-batches (the body, run for each of them, needs {body})"

    def bind(
        self,
        *,
        seed: int = 0,
        threads: int | None = None,
        share: Session | None = None,
        weights: str | Path | None = None,
        poison: bool = False,
        capture: bool = True,
    ) -> Session:
        """Allocate the one arena and make the plan ready to run.

        Args:
            seed: of the first parameters and of everything random.
            threads: of the BLAS library, for the whole process; a plan for the target cpu has decided on them already.
            share: a session of the same model whose parameters are used in place.
            weights: a checkpoint whose parameters and running statistics to start from. Its optimizer state is left
                out: `Session.load` goes on where a training stopped.
            poison: check every step with poisoned memory; slow.
            capture: whether a card runs its steps as one graph, captured in the first; if not, kernel by kernel.

        Raises:
            DoesNotFitError: it takes more host memory than is left.
        """
        from foreplan.runtime.session import Session

        session = Session(
            self.program,
            self.plan,
            update=self.update,
            seed=seed,
            threads=threads,
            share=share,
            poison=poison,
            capture=capture,
        )
        if weights is not None:
            session.load(weights, state=False)
        return session

    def save(self, path: str | Path, *, kernels: bool = False) -> None:
        """Write the plan file: everything needed to verify, view and run it, but no weights.

        Args:
            kernels: with machine code of the kernels that a card runs, so that who trusts the file compiles nothing.

        Raises:
            UsageError, SessionError: the file cannot be written, or kernels are asked for and the plan is for no card.
            TargetError: there is no CUDA compiler.
        """
        from foreplan.runtime.planfile import save_plan

        program, update = self.program, self.update
        if flag("kernels", kernels):
            from foreplan.runtime.cuda.code import with_code

            program = with_code(program, self.plan)
            update = update and replace(update, program=with_code(update.program, update.plan))
        save_plan(path_of("save", path), program, self.plan, update)

    def view(self, path: str | Path) -> None:
        """Write the memory map, of what `memory` shows: one HTML file that opens offline."""
        from foreplan.views.memory_map import write_map

        title = f"{self.program.model} on {self.program.target}"
        write_map(path_of("view", path), *self.highest, title=f"{title}: {self._part}" if self._part else title)

    def estimate(self) -> dict[str, Any]:
        """What `foreplan estimate --json` prints; sizes in bytes."""
        program, memory = self.program, self.memory
        halves = [(program, self.plan, self.accumulate)]
        halves += [] if self.update is None else [(self.update.program, self.update.plan, 1)]
        costs = Totals(0, 0, 0, 0)
        for half, plan, times in halves:
            costs += totals(half, [[step.action for step in plan.steps]])[0] * times
        return {
            "model": program.model,
            "target": program.target,
            "mode": "inference" if program.loss is None else "training",
            "accumulate": self.accumulate,
            "peak_bytes": memory.peak,
            "arena_bytes": memory.arena,
            "host_bytes": self.host_bytes,
            "lower_bound_bytes": memory.lower_bound,
            "order_lower_bound_bytes": memory.order_lower_bound,
            "persistent_bytes": memory.persistent,
            "categories": {str(category): nbytes for category, nbytes in memory.categories.items()},
            "outside": [asdict(part) for part in memory.outside],
            "flops": costs.flops,
            "extra_flops_ratio": costs.extra_flops_ratio,
            "extra_seconds_ratio": costs.extra_seconds_ratio,
            "predicted_seconds": costs.nanoseconds / 1e9,
            "nodes": len(program.calls if self.graph is None else self.graph.nodes)
            + sum(len(half.calls) for half, _, _ in halves[1:]),
            "instructions": sum(len(plan.steps) for _, plan, _ in halves),
            "plan_seconds": self.plan_seconds,
            "budget_bytes": self.plan.budget,
            "notes": [note for half, _, _ in halves for note in half.notes],
        }


def load_plan(path: str | Path, *, trust_code: bool = False, weights_folder: str | Path | None = None) -> Compiled:
    """The compiled step that `Compiled.save` wrote; checked and verified, whatever the file holds: see docs/trust.md.

    Args:
        trust_code: run machine code that the file has for a card, which is else made anew by `bind`.
        weights_folder: where the files with weights are; None: beside the plan or below.

    Raises:
        PlanError: the file is damaged, edited or of another version, or leads to weights elsewhere.
    """
    from foreplan.runtime.planread import read_plan

    folder = None if weights_folder is None else path_of("weights_folder", weights_folder)
    program, planned, update = read_plan(path_of("load_plan", path), flag("trust_code", trust_code), folder)
    verify(planned, program)
    if update is not None:
        update.verify(program, planned)
    return Compiled(program, planned, update=update)


def from_onnx(model: Any, shapes: dict[str, tuple[int, ...]] | None = None, batch: int | None = None) -> Graph:
    """A model from an ONNX file (see `foreplan.frontend.from_onnx`)."""
    from foreplan.frontend import from_onnx as load

    return load(model, shapes=shapes, batch=batch)
