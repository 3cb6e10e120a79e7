"""The front door: import → differentiate → lower → plan → bind; `compile` is all of them in a row."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan import passes
from foreplan.errors import DoesNotFitError, UsageError
from foreplan.graph import Graph
from foreplan.lower import Program, Target
from foreplan.lower import lower as lower
from foreplan.passes.optimizer import Optimizer
from foreplan.planner import Plan, Problem
from foreplan.planner import plan as search
from foreplan.planner import verify as verify

if TYPE_CHECKING:
    from foreplan.runtime.session import Session
    from foreplan.views.memory import Memory


def differentiate(
    graph: Graph, loss: Any = None, optimizer: Optimizer | None = None, outputs: Iterable[str] = ()
) -> Graph:
    """The whole training step of a model: forward, loss, backward and updates in one graph.

    Args:
        graph: a model in inference form.
        loss: one of `foreplan.losses`, or a traceable function of the model's outputs and of further inputs (its
            parameters with a `foreplan.spec` as default). None where the graph has a loss already.
        optimizer: one of `foreplan.optim`; None: the step returns gradients and updates no parameter.
        outputs: names of what a step returns beside the loss. An output that is returned must stay alive.

    Raises:
        ModelError: nothing can be differentiated; names the node.
        UsageError: an output that does not exist.
    """
    from foreplan.frontend.losses import attach_loss

    _check_graph(graph)
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "learning_rate")):
        raise UsageError(f"the optimizer must be one such as optim.Nesterov(0.1), and is {optimizer!r}")
    names = _names(outputs)
    passes.select_outputs(graph, names)  # a wrong name is told before anything else is done
    if loss is not None:
        graph = attach_loss(graph, loss)
    forward = passes.simplified(passes.training_form(passes.select_outputs(graph, names)))
    return passes.simplified(passes.differentiate(forward, optimizer))


def inference(graph: Graph, outputs: Iterable[str] | None = None) -> Graph:
    """The forward pass alone, simplified.

    Args:
        graph: a model in inference form.
        outputs: names of what a step returns; all of the model's outputs by default.
    """
    _check_graph(graph)
    chosen = graph if outputs is None else passes.select_outputs(graph, _names(outputs))
    return passes.simplified(chosen)


def plan(problem: Problem, budget: int | float | str | None = None, remat: str = "free") -> Plan:
    """The lowest plan found for a problem, verified: see `foreplan.planner.plan`.

    Raises:
        DoesNotFitError: the budget cannot be met; shows the peak with its largest buffers, and what to try next.
        PlanError, UsageError: as the planner's own.
    """
    try:
        return search(problem, budget, remat)
    except DoesNotFitError as error:
        if error.plan is None:
            raise
        from foreplan.views.memory import Memory, does_not_fit

        sizes = {"needed": error.needed, "capacity": error.capacity, "lower_bound": error.lower_bound}
        text = does_not_fit(Memory.of(problem, error.plan), error.capacity, error.advice)
        raise DoesNotFitError(text, **sizes, plan=error.plan, advice=error.advice) from None


def _check_graph(graph: Graph) -> None:
    if not isinstance(graph, Graph):
        raise UsageError(
            f"a model must be a Graph, and is {graph!r}: make one with from_onnx(path), trace(function, *specs) or "
            "models.build(name)"
        )


def _names(outputs: Iterable[str]) -> list[str]:
    if isinstance(outputs, str):
        raise UsageError(f"outputs takes a list of names: outputs=[{outputs!r}]")
    return list(outputs)


def compile(
    graph: Graph,
    loss: Any = None,
    optimizer: Optimizer | None = None,
    *,
    target: str | Target = "numpy",
    budget: int | float | str | None = None,
    remat: str = "free",
    outputs: Iterable[str] | None = None,
) -> Compiled:
    """Compile a model and plan every byte of one step. Nothing is allocated.

    Args:
        graph: from `from_onnx`, `trace` or `models`.
        loss: see `differentiate`; None: inference.
        optimizer: see `differentiate`.
        target: the engine that will run it.
        budget: bytes that the arena must stay within: a number, a text such as "2GiB", or a ratio below 1 of the
            arena without a budget.
        remat: `off`, `free` or `auto`: what may be recomputed to save memory.
        outputs: names of what a step returns beside the loss.

    Raises:
        DoesNotFitError: the budget cannot be met; says the least that can.
        ForeplanError: anything else that cannot be compiled; says what and where.
    """
    started = time.perf_counter()
    _check_graph(graph)
    if loss is None and graph.loss is None:
        if optimizer is not None:
            raise UsageError("an optimizer needs a loss to minimise: pass loss=, for example losses.cross_entropy")
        step = inference(graph, outputs)
    else:
        step = differentiate(graph, loss, optimizer, outputs or ())
    program = lower(step, target)
    planned = plan(program, budget=budget, remat=remat)
    return Compiled(program, planned, step, time.perf_counter() - started)


@dataclass(frozen=True)
class Compiled:
    """A compiled step: its program and plan, ready to look at, to save and to bind.

    Attributes:
        program: the planner's problem, with what each action runs.
        plan: the answer, verified.
        graph: the whole step as a graph; None where the plan came from a file.
        plan_seconds: wall time from the model's graph to the verified plan.
    """

    program: Program
    plan: Plan
    graph: Graph | None = None
    plan_seconds: float = 0.0

    @property
    def memory(self) -> Memory:
        """Where the bytes are: peak, bounds, categories, what is alive when."""
        from foreplan.views.memory import Memory

        return Memory.of(self.program, self.plan)

    def bind(
        self,
        *,
        seed: int = 0,
        threads: int | None = None,
        share: Session | None = None,
        weights: str | Path | None = None,
        poison: bool = False,
    ) -> Session:
        """Allocate the one arena and make the plan ready to run.

        Args:
            seed: of the first parameters and of everything random.
            threads: of the BLAS library, for the whole process.
            share: a session of the same model whose parameters are used in place.
            weights: a checkpoint whose parameters and running statistics to start from. Its optimizer state is left
                out: `Session.load` goes on where a training stopped.
            poison: check every step with poisoned memory; slow.
        """
        from foreplan.runtime.session import Session

        session = Session(self.program, self.plan, seed=seed, threads=threads, share=share, poison=poison)
        if weights is not None:
            session.load(weights, state=False)
        return session

    def save(self, path: str | Path) -> None:
        """Write the plan file: everything needed to verify, view and run it, but no weights."""
        from foreplan.runtime.planfile import save_plan

        save_plan(str(path), self.program, self.plan)

    def view(self, path: str | Path) -> None:
        """Write the memory map: one HTML file that opens offline."""
        from foreplan.views.memory_map import write_map

        write_map(path, self.program, self.plan, title=f"{self.program.model} on {self.program.target}")

    def estimate(self) -> dict[str, Any]:
        """What `foreplan estimate --json` prints; sizes in bytes."""
        program, plan = self.program, self.plan
        memory = self.memory
        flops = sum(program.actions[step.action].flops for step in plan.steps)
        nanoseconds = sum(program.actions[step.action].nanoseconds for step in plan.steps)
        once = {step.action for step in plan.steps}
        least_flops = sum(program.actions[action].flops for action in once)
        least_nanoseconds = sum(program.actions[action].nanoseconds for action in once)
        return {
            "model": program.model,
            "target": program.target,
            "mode": "inference" if program.loss is None else "training",
            "peak_bytes": plan.arena_bytes,
            "arena_bytes": plan.arena_bytes,
            "lower_bound_bytes": plan.lower_bound_bytes,
            "order_lower_bound_bytes": plan.order_lower_bound_bytes,
            "persistent_bytes": memory.persistent,
            "categories": {str(category): nbytes for category, nbytes in memory.categories.items()},
            "flops": flops,
            "extra_flops_ratio": flops / least_flops - 1 if least_flops else 0.0,
            "extra_seconds_ratio": nanoseconds / least_nanoseconds - 1 if least_nanoseconds else 0.0,
            "predicted_seconds": nanoseconds / 1e9,
            "nodes": len(program.calls) if self.graph is None else len(self.graph.nodes),
            "instructions": len(plan.steps),
            "plan_seconds": self.plan_seconds,
            "budget_bytes": plan.budget,
            "notes": list(program.notes),
        }


def load_plan(path: str | Path) -> Compiled:
    """The compiled step that `Compiled.save` wrote; checked and verified, whatever the file holds.

    Raises:
        PlanError: the file is damaged, edited or of another version.
    """
    from foreplan.runtime.planfile import read_plan

    program, planned = read_plan(str(path))
    verify(planned, program)
    return Compiled(program, planned)


def from_onnx(model: Any, shapes: dict[str, tuple[int, ...]] | None = None, batch: int | None = None) -> Graph:
    """A model from an ONNX file (see `foreplan.frontend.from_onnx`)."""
    from foreplan.frontend import from_onnx as load

    return load(model, shapes=shapes, batch=batch)
