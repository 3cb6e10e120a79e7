"""A compiled step: its program and plan, to look at, to save, to read back and to bind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan.base.arguments import flag, instance, path_of
from foreplan.base.late import late
from foreplan.base.units import format_bytes
from foreplan.graph import Graph
from foreplan.lower.exchanges import check_waits
from foreplan.lower.program import HOST, Program
from foreplan.lower.targets import engine_info
from foreplan.options import USUAL, Options
from foreplan.planner import Plan, Totals, verify

if TYPE_CHECKING:
    from foreplan.lower.outside import Use
    from foreplan.report.beside import Beside
    from foreplan.report.explanation import Explanation, Rebuild
    from foreplan.report.memory import Memory
    from foreplan.report.verdict import Verdict
    from foreplan.report.weights import Weights
    from foreplan.runtime.beside import Evaluation, Metrics
    from foreplan.runtime.session import Session
    from foreplan.runtime.update import Update


@dataclass(frozen=True)
class Compiled:
    """A compiled step: its program and plan, ready to look at, to save and to bind.

    Attributes:
        program: the planner's problem, with what each action runs.
        plan: the answer, verified.
        graph: the whole step as a graph; None where the plan came from a file.
        plan_seconds: wall time from the model's graph to the verified plan, without `compile_seconds`; short where the
            plan was found before and kept on disk.
        compile_seconds: wall time for what this machine does once: compiling the planner.
        update: of a step that accumulates gradients: what runs once after its micro-batches, for each of which the
            program runs; None: the program is the whole step.
        options: those that it was compiled with; a plan file keeps all but loss, optimizer and passes.
        model: the graph that was compiled, for writing the model; None where the plan came from a file.
    """

    program: Program
    plan: Plan
    graph: Graph | None = None
    plan_seconds: float = 0.0
    compile_seconds: float = 0.0
    update: Update | None = None
    options: Options = USUAL
    model: Graph | None = None

    def __repr__(self) -> str:
        mode = "inference" if self.program.loss is None else "training"
        size = format_bytes(self.arena_bytes)
        return (
            f"<Compiled {self.program.model}: {mode} on {self.program.target}, {len(self.plan.steps)} steps in {size}>"
        )

    @property
    def accumulate(self) -> int:
        """How many micro-batches a step takes; 1: the program is the whole step."""
        return 1 if self.update is None else self.update.micro_batches

    @property
    def arena_bytes(self) -> int:
        """Height of the one arena in which the whole step runs."""
        return self.highest[1].arena_bytes

    @property
    def counted_bytes(self) -> int:
        """What it takes of the memory that a budget limits: all of it on a card, the arena on the host."""
        return self.memory.peak if engine_info(self.program.target).on_card else self.arena_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory for what the step copies there."""
        heights = self.plan.heights if self.update is None else self.update.heights(self.plan)
        return sum(heights[HOST:])

    @property
    def highest(self) -> tuple[Program, Plan]:
        """The half of the step that needs more memory, as program and plan."""
        if self.update is None or self.update.plan.arena_bytes <= self.plan.arena_bytes:
            return self.program, self.plan
        return self.update.program, self.update.plan

    @property
    def memory(self) -> Memory:
        """Where the bytes are: peak, bounds, categories, what is alive when, and what lies outside the arena. Of a step
        in two halves, that of the half that needs more.

        Raises:
            TargetError: what the user has measured outside arenas cannot be read.
        """
        from foreplan.report.memory import Memory

        return Memory.of(*self.highest, self._part, self._use)

    @property
    def weights(self) -> Weights:
        """The model's tensors: what the step trains, what it leaves as it is, and why."""
        from foreplan.report.weights import Weights

        return Weights.of(self.program.tensors if self.graph is None else self.graph.stored)

    @property
    def _use(self) -> Use:
        """What this process does with the step besides its highest half."""
        from foreplan.lower.outside import Use, returned_bytes

        if self.update is None:
            return Use(compiles=self.graph is not None)
        body, update = (self.program, self.plan), (self.update.program, self.update.plan)
        returned = returned_bytes(self.program, self.accumulate)
        return Use(self.graph is not None, update if self.highest[1] is self.plan else body, returned)

    @property
    def verdict(self) -> Verdict:
        """Whether the step fits the card that it is planned for, with everything that it needs there.

        Raises:
            TargetError: what the user has measured outside arenas cannot be read.
        """
        from foreplan.lower.outside import lacking
        from foreplan.report.verdict import Verdict

        profile = self.program.profile
        return Verdict.of(self.memory, None if profile is None else profile.memory_bytes, lacking(self.program))

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
            DoesNotFitError: it takes more memory than is left, of the host or of the card.
        """
        from foreplan.runtime.beside import Beside
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
            graphs=(self.model, self.graph if self.update is None else None),
            beside=Beside(partial(_evaluation, self), partial(_step, self)),
        )
        if weights is not None:
            session.load(weights, state=False)
        return session

    def evaluation(
        self, samples: int | None = None, *, outputs: Iterable[str] | None = None, metrics: Metrics = ()
    ) -> Compiled:
        """What `Session.evaluate` compiles when it is first called, to look at its memory before.

        It runs in the step's arena, and is planned within it. Beside that it keeps its own constants, the memory of
        the region `state` of its plan.

        Args:
            samples: how many it takes at once, along the first axis of the inputs; None: as many as the step.
            outputs, metrics: see `Session.evaluate`.

        Raises:
            UsageError, UnsupportedError, DoesNotFitError: see `Session.evaluate`.
        """
        made: Compiled = late("foreplan.compiler.evaluating:evaluation_for")(self, samples, outputs, metrics)[0]
        return made

    def save(self, path: str | Path, *, kernels: bool = False) -> None:
        """Write the plan file: everything needed to verify, view and run it, but no weights.

        Args:
            kernels: with machine code of the kernels that a card runs, so that a reader who trusts the file compiles
                nothing.

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
        save_plan(path_of("save", path), program, self.plan, update, self.options)

    @property
    def _title(self) -> str:
        title = f"{self.program.model} on {self.program.target}"
        return f"{title}: {self._part}" if self._part else title

    def view(self, path: str | Path, *, over: Compiled | None = None, format: str | None = None) -> None:
        """Write what `memory` shows to a file, in the format that its name asks for; docs/memory-map.md has them all.

        Args:
            path: ends in `.html` for the memory map, in `.svg`, `.csv`, `.trace.json`, `.speedscope.json`, `.onnx`,
                `.graphml`, `.dot` or `.pickle`.
            over: another step, whose plan lies over this one on the map.
            format: what is written, whatever the name is: "html", "svg", "csv", "trace", "speedscope", "onnx",
                "graphml", "dot" or "snapshot".

        Raises:
            UsageError: the name asks for no format; or the file cannot be written; or networkx, which GraphML needs, is
                not installed.
        """
        from foreplan.report.peak_words import peak_words
        from foreplan.report.timeline import Timeline

        if over is not None:
            instance("over", over, Compiled, "give what `compile` or `load_plan` returns")
        other = None if over is None else over.memory
        notes = (*peak_words(self.memory, Timeline.of(*self.highest)), *self.highest[0].notes)
        write = late("foreplan.views.formats:write_view")
        write(path_of("view", path), self.memory, self._title, other, notes, format)

    def _repr_html_(self) -> str:
        """What a notebook shows: the key numbers, and a small memory map."""
        drawn: str = late("foreplan.views.picture:notebook_html")(self.memory, self._title)
        return drawn

    def explain(self, rebuild: Rebuild | None = None) -> Explanation:
        """Why the step needs the memory that it needs, and what each change would bring; print it. Every figure is
        computed, so it takes some times as long as compiling.

        Args:
            rebuild: a function from a batch to the model, to see what a smaller one brings; None: that is left out.
        """
        explained: Explanation = late("foreplan.fit.explanation:explain")(self, rebuild)
        return explained

    def as_pytorch(self, **variant: Any) -> Beside:
        """The same step as eager PyTorch runs it, beside the plan: bytes of live tensors, phase by phase.

        Args:
            variant: what may differ from one PyTorch user to the next, such as `zero="keep"`: see
                `foreplan.eager.Variant`.

        Raises:
            UsageError: no such option; or this is a plan file, for several ranks, or in fp16.
            UnsupportedError: an op whose memory in PyTorch is not known; names the node.
        """
        beside: Beside = late("foreplan.fit.beside_pytorch:beside_pytorch")(self, variant)
        return beside

    def estimate(self) -> dict[str, Any]:
        """What `foreplan estimate --json` prints; sizes in bytes."""
        from foreplan.lower.exchanges import Exchanges

        program, memory = self.program, self.memory
        halves = [(program, self.plan, self.accumulate)]
        halves += [] if self.update is None else [(self.update.program, self.update.plan, 1)]
        costs, exchanges = Totals(0, 0, 0, 0), Exchanges()
        for half, plan, times in halves:
            costs += half.costs(plan) * times
            exchanges += Exchanges.of(half, plan) * times
        return {
            "model": program.model,
            "target": program.target,
            "mode": "inference" if program.loss is None else "training",
            "accumulate": self.accumulate,
            "ranks": exchanges.ranks,
            "tensor": program.tensor,
            "sent_bytes": exchanges.sent,
            "exchanges": exchanges.count,
            "exchange_seconds": exchanges.nanoseconds / 1e9,
            "weights": self.weights.to_json(),
            "peak_bytes": memory.peak,
            "arena_bytes": memory.arena,
            **self.verdict.to_json(),
            "host_bytes": self.host_bytes,
            "lower_bound_bytes": memory.lower_bound,
            "order_lower_bound_bytes": memory.order_lower_bound,
            "persistent_bytes": memory.persistent,
            "categories": {str(category): nbytes for category, nbytes in memory.categories.items()},
            "outside": [asdict(part) for part in memory.outside],
            "flops": costs.flops,
            "extra_flops_ratio": costs.extra_flops_ratio,
            "extra_seconds_ratio": costs.extra_seconds_ratio,
            "predicted_seconds": (exchanges.step if exchanges.ranks > 1 else costs.nanoseconds) / 1e9,
            "nodes": len(program.calls if self.graph is None else self.graph.nodes)
            + sum(len(half.calls) for half, _, _ in halves[1:]),
            "instructions": sum(len(plan.steps) for _, plan, _ in halves),
            "plan_seconds": self.plan_seconds,
            "compile_seconds": self.compile_seconds,
            "budget_bytes": self.plan.budget,
            "options": self.options.to_json(),
            "notes": [note for half, _, _ in halves for note in half.notes],
        }


def _evaluation(
    step: Compiled, shapes: Mapping[str, tuple[int, ...]], outputs: Iterable[str] | None, metrics: Metrics
) -> Evaluation:
    """What `Session.evaluate` runs."""
    found: Evaluation = late("foreplan.compiler.evaluating:evaluation_of")(step, shapes, outputs, metrics)[1]
    return found


def _step(step: Compiled, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Program, Plan]:
    """What `Session.step` runs for a smaller batch."""
    made: Compiled = late("foreplan.compiler.evaluating:step_of")(step, shapes)
    return made.program, made.plan


def load_plan(path: str | Path, *, trust_code: bool = False, weights_folder: str | Path | None = None) -> Compiled:
    """The compiled step that `Compiled.save` wrote; checked and verified, whatever the file holds: see docs/trust.md.

    Args:
        trust_code: run the file's machine code for a card; else `bind` compiles it anew.
        weights_folder: where the files with weights are; None: beside the plan or below.

    Raises:
        PlanError: the file is damaged, edited or of another version, or leads to weights elsewhere.
    """
    from foreplan.runtime.planread import read_plan

    folder = None if weights_folder is None else path_of("weights_folder", weights_folder)
    program, planned, update, options = read_plan(path_of("load_plan", path), flag("trust_code", trust_code), folder)
    verify(planned, program)
    check_waits(program)
    if update is not None:
        update.verify(program, planned)
    return Compiled(program, planned, update=update, options=options)
