"""Graph → Program: views resolved into windows, kernels chosen, every byte of workspace known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from foreplan.base.arguments import flag, instance, whole
from foreplan.base.errors import ShapeError, UnsupportedError, UsageError
from foreplan.base.patterns import AS_PLANNED, ActivationChoices
from foreplan.base.units import parse_bytes
from foreplan.graph import Cost, Graph, Kind, Node, Op, Value, Window
from foreplan.graph.blocks import Blocks
from foreplan.graph.names import Names
from foreplan.graph.op import Types
from foreplan.lower.activation_choices import with_activation_choices
from foreplan.lower.exchanges import check_waits, cluster_for, exchange_nanoseconds, goes_on_beside
from foreplan.lower.fallbacks import notes_of
from foreplan.lower.in_place import gathered_in_place
from foreplan.lower.offload import with_host
from foreplan.lower.prefetch import with_prefetch
from foreplan.lower.prepack import best_blocks, prepack_note
from foreplan.lower.program import ARENA, CATEGORIES, REGIONS, Call, Operand, Program, Slot, region_of
from foreplan.lower.target import Candidate, Target
from foreplan.lower.targets import AUTO, chosen_target, why_numpy
from foreplan.lower.valid import with_valid
from foreplan.ops.collective import Begin, Finish
from foreplan.ops.map import COPY
from foreplan.ops.point_to_point import BeginMessage
from foreplan.passes.pipeline import Change, changed, check_change, run_passes, target_passes
from foreplan.planner import problem as p

WORKSPACE = "auto"  # see `lower`
ENOUGH = 64 << 20  # bytes of workspace for most kernels
FASTER = 1.3  # a kernel that needs more workspace must be this many times as fast


def lower(
    graph: Graph,
    target: str | Target = AUTO,
    *,
    activations: ActivationChoices = AS_PLANNED,
    offload: bool = False,
    prefetch: bool = False,
    prepack: bool = False,
    tune: bool = False,
    accuracy: str = "default",
    workspace: int | str = WORKSPACE,
    links: str = "",
    passes: Change | None = None,
) -> Program:
    """The planner's problem for a graph on a target, with what each action runs.

    Ops for which the target has no kernel are decomposed. Views become windows: no action, no bytes; where a kernel
    cannot read a window as it lies, a dense copy is an action of its own. A note names the ops that run NumPy's kernels
    on the target `cpu`.

    Args:
        activations: those that are kept, recomputed or copied to the host (see `with_activation_choices`).
        offload: with a region of host memory, and actions that copy activations there and back (see `with_host`).
        prefetch: with a second slot for every input without a default (see `with_prefetch`).
        prepack: with stored values that no step changes in the blocks in which their readers are fastest.
        target: by name (see `target_named`), or one that has been made.
        tune: price kernels by measuring each once on this machine, as a target given by name.
        accuracy: "strict": as `target_named` takes it, of a target given by name.
        workspace: leave out kernels that need more bytes of it, such as "64MiB", where others need less; "unlimited";
            or "auto": leave out those that need more than 64 MiB, unless they are 1.3 times as fast as all others.
        links: between ranks, as `foreplan.lower.exchanges.cluster_from` takes it.
        passes: changes the list of the target's passes; None: it stays as it is.

    Raises:
        UsageError: no such target, a size that cannot be understood, or `prepack` of a step that trains.
        UnsupportedError: the target has no kernel for an op, and the op no decomposition; names the node.
    """
    instance("what is lowered", graph, Graph, "make one with from_onnx, trace or models.build")
    instance(
        "activations", activations, ActivationChoices, "make one with patterns.ActivationChoices(keep=('h.*.attn',))"
    )
    offload, prefetch, tune = flag("offload", offload), flag("prefetch", prefetch), flag("tune", tune)
    if flag("prepack", prepack) and graph.loss is not None:
        raise UsageError("prepack is for weights that never change, and this step trains them: leave it out")
    workspace = workspace if isinstance(workspace, str) else whole("workspace", workspace, 0)
    chosen = chosen_target(target, tune=tune, accuracy=accuracy)
    beside = goes_on_beside(links, chosen.profile)
    check_change("passes", passes)
    formed = run_passes(graph, changed(target_passes(chosen, beside), passes), machine=chosen)
    formed = gathered_in_place(formed, beside)
    program = _Lowering(formed, chosen, workspace, {}, links).run()
    if prepack:
        if blocks := best_blocks(program, chosen):
            program = _Lowering(formed, chosen, workspace, blocks, links).run()
        program = replace(program, notes=(*program.notes, prepack_note(program, blocks)))
    because = (why_numpy(),) if target == AUTO and why_numpy() else ()
    program = replace(program, notes=(*program.notes, *because, *chosen.notes, *notes_of(program)))
    program = with_activation_choices(program, chosen, activations)
    program = with_host(program, chosen) if offload else program
    return with_prefetch(program) if prefetch else program


def lower_in_blocks(graph: Graph, target: Target, blocks: Mapping[str, Blocks]) -> Program:
    """As `lower`, with stored values in blocks, by name: those that `best_blocks` found for this graph and target."""
    formed = run_passes(graph, target_passes(target), machine=target)
    return _Lowering(formed, target, WORKSPACE, blocks).run()


class _Lowering:
    """One lowering: the lists that grow, and where each graph value has gone."""

    def __init__(
        self, graph: Graph, target: Target, workspace: int | str, blocks: Mapping[str, Blocks], links: str = ""
    ) -> None:
        self.graph, self.target, self.links = graph, target, links
        self.blocks = blocks  # in which stored values lie, by name
        # The most workspace of a kernel; None: no limit. A kernel with more is taken if it needs at most this share of
        # the time.
        self.most: int | None = None
        self.faster = 0.0
        if workspace == "auto":
            self.most, self.faster = ENOUGH, 1 / FASTER
        elif workspace != "unlimited":
            self.most = parse_bytes(workspace)
        self.values: list[p.Value] = []
        self.actions: list[p.Action] = []
        self.calls: list[Call] = []
        self.where: dict[Value, Operand] = {}
        self.copies: dict[tuple[Operand, Window], Operand] = {}
        self.begun: dict[int, Begin] = {}  # exchanges, by the place of what arrives
        self.names = Names()
        # A value that becomes the content of one stored value is written straight to that value's home.
        self.home: dict[Value, Value] = {}
        for old, new in graph.updates.items():
            self.home.setdefault(new, old)
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.last_read = self.find_last_reads()

    def run(self) -> Program:
        graph = self.graph
        inputs = [self.slot(value, self.new_root(value, p.Role.INPUT, ARENA)) for value in graph.inputs]
        ordered = sorted(graph.stored, key=lambda value: region_of(value.kind))
        stored = [self.slot(v, self.new_stored(v)) for v in ordered]
        for node in graph.nodes:
            self.lower_node(node)
        outputs = [self.result(name, value, p.Category.OUTPUTS) for name, value in graph.outputs.items()]
        gradients = [self.result(name, value, p.Category.GRADIENTS) for name, value in graph.gradients.items()]
        loss = None if graph.loss is None else self.result("loss", graph.loss, p.Category.OUTPUTS)
        self.finish_updates()
        if sum(value.nbytes for value in self.values) + sum(action.workspace for action in self.actions) >> 62:
            raise ShapeError(
                f"graph {graph.name!r} needs more than 2**62 bytes: no machine holds it, so check its sizes"
            )
        program = Program(
            values=tuple(self.values),
            actions=tuple(self.actions),
            regions=REGIONS,
            calls=tuple(self.calls),
            target=self.target.name,
            profile=self.target.profile,
            model=graph.name,
            inputs=tuple(inputs),
            stored=tuple(stored),
            outputs=tuple(outputs),
            loss=loss,
            gradients=tuple(gradients),
            notes=graph.notes,
        )
        check_waits(program)
        return with_valid(program)

    def find_last_reads(self) -> dict[Value, int]:
        """The position of the last node that reads each value, itself or through views; results are read last."""
        last = {value: len(self.graph.nodes) for value in self.graph.results}
        for node in reversed(self.graph.nodes):
            at = last.get(node.outputs[0], -1) if node.op.is_view else self.position[node]
            for value in node.inputs:
                last[value] = max(last.get(value, -1), at)
        return last

    def new_value(self, name: str, nbytes: int, category: p.Category, role: p.Role, region: int, home: int = -1) -> int:
        self.values.append(p.Value(self.names.claim(name), nbytes, self.target.alignment, region, category, role, home))
        return len(self.values) - 1

    def new_root(self, value: Value, role: p.Role, region: int, blocks: Blocks | None = None) -> Operand:
        operand = Operand(len(self.values), 0, value.type, value.type.strides, blocks=blocks)
        self.new_value(value.name, operand.nbytes, CATEGORIES[value.kind], role, region)
        self.where[value] = operand
        return operand

    def new_stored(self, value: Value) -> Operand:
        return self.new_root(value, p.Role.STORED, region_of(value.kind), self.blocks.get(value.name))

    def slot(self, value: Value, operand: Operand) -> Slot:
        return Slot(value.name, operand, value.kind, value.init)

    def lower_node(self, node: Node) -> None:
        if node.op.is_view:
            self.where[node.outputs[0]] = self.look(node)
            return
        outputs = [value.type for value in node.outputs]
        operands = [self.where[value] for value in node.inputs]
        windows = self.target.reads(node.op, [operand.window for operand in operands], outputs)
        for i, (operand, wanted) in enumerate(zip(operands, windows)):
            if wanted != operand.window:
                operands[i] = self.copy(operand, node, wanted)
        writes = []
        for value, layout in zip(node.outputs, self.target.layouts(node.op, windows, outputs)):
            old = self.home.get(value)
            if old is not None and self.updates_in_place(node, value, old):
                role, region, home = p.Role.OUTPUT, region_of(old.kind), self.where[old].value
                layout = self.where[old].window
                index = self.new_value(value.name, value.type.nbytes, CATEGORIES[old.kind], role, region, home)
            else:
                arrives = isinstance(node.op, Begin | Finish)
                category = p.Category.COMMUNICATION if arrives else CATEGORIES[value.kind]
                index = self.new_value(value.name, value.type.nbytes, category, p.Role.TRANSIENT, ARENA)
            self.where[value] = Operand(index, 0, value.type, layout.strides)
            writes.append(self.where[value])
        if begin := node.of(Begin):
            self.stay((operands[0], writes[0]))
            self.begun[writes[0].value] = begin.op
        begun = self.begun.get(operands[0].value) if node.of(Finish) else None
        for kernel, price in self.candidates(node.op, operands, writes):
            time = price if begun is None else self.exchange(begun, [operands[1].type], waits=True)
            self.act(node.op, kernel, time, operands, writes, node.name, node.source)
        if begun is not None:
            self.gather_again(node, begun, operands[1], writes)

    def gather_again(self, node: Node, begun: Begin, sent: Operand, writes: Sequence[Operand]) -> None:
        """Another way to what has been gathered, for plans that do not keep it for what is recomputed from it."""
        if begun.kind != "all_gather":
            return
        op = replace(begun, wait=True)
        for kernel, price in self.candidates(op, [sent], writes):
            self.act(op, kernel, price, [sent], writes, f"{node.name}/again", node.source)

    def stay(self, under_way: Iterable[Operand]) -> None:
        """Let what is sent, and the place of what arrives, be made once, and stay until the exchange is done."""
        for operand in under_way:
            value = self.values[operand.value]
            if value.role is p.Role.TRANSIENT:
                self.values[operand.value] = replace(value, kept=True)

    def candidates(
        self, op: Op, inputs: Sequence[Operand], outputs: Sequence[Operand]
    ) -> Sequence[tuple[Candidate, int]]:
        """Kernels with their prices, the fastest first: those that no other beats in both time and workspace, within
        the workspace that is allowed, or the least that any needs. For an op with an effect only the fastest, since
        every such action runs.
        """
        reads, writes = [x.window for x in inputs], [y.window for y in outputs]
        kernels = self.target.kernels(op, reads, writes)
        kernels = [kernel for kernel in kernels if all(x.offset % kernel.alignment == 0 for x in (*inputs, *outputs))]
        if not kernels:
            where = ", ".join(f"{x.window.type} from byte {x.offset} on" for x in inputs)
            raise UnsupportedError(f"target {self.target.name} has no kernel for {op.name} that takes {where}")
        priced = [(self.price(op, kernel, reads, writes), kernel) for kernel in kernels]
        if self.most is not None:
            most = max(self.most, min(kernel.workspace for kernel in kernels))
            limit = min(price for price, kernel in priced if kernel.workspace <= most) * self.faster
            priced = [each for each in priced if each[1].workspace <= most or each[0] < limit]
        found: list[tuple[Candidate, int]] = []
        for price, kernel in sorted(priced, key=lambda pair: (pair[0], pair[1].workspace)):
            if all(kernel.workspace < other.workspace for other, _ in found):
                found.append((kernel, price))
        effect = any(self.values[operand.value].home >= 0 for operand in outputs)
        return found[:1] if effect else found

    def price(self, op: Op, kernel: Candidate, reads: Sequence[Window], writes: Sequence[Window]) -> int:
        """The time of a kernel; of an exchange, that of the links between ranks."""
        if isinstance(op, Begin):
            return self.exchange(op, [x.type for x in reads], waits=False)
        return self.target.price(op, kernel, reads, writes)

    def exchange(self, op: Begin, inputs: Types, waits: bool) -> int:
        """The time of an exchange, with what begins it; where processors move the bytes themselves, with what waits."""
        cluster = cluster_for(op, self.links, self.target.profile)
        moved_in_wait = cluster.by_processor and not op.wait and not isinstance(op, BeginMessage)
        return exchange_nanoseconds(op, inputs, cluster) if waits == moved_in_wait else 0

    def updates_in_place(self, node: Node, new: Value, old: Value) -> bool:
        """Whether the node's kernels may write the new content over the old: nobody reads the old content later, and
        the kernels do not read it, or may overwrite it (and see it only once, and whole).
        """
        if self.last_read.get(old, -1) > self.position[node] or node.op.completes:
            return False
        windows = [self.where[value].window for value in node.inputs]
        outputs = self.target.layouts(node.op, windows, [value.type for value in node.outputs])
        root = self.where[old].value
        at = [i for i, value in enumerate(node.inputs) if self.where[value].value == root]
        if any(self.where[node.inputs[i]] != self.where[old] for i in at):
            return False
        output = node.outputs.index(new)
        if outputs[output] != self.where[old].window:
            return False
        kernels = self.target.kernels(node.op, windows, outputs)
        return all((output, i) in kernel.overwrites for kernel in kernels for i in at)

    def look(self, node: Node) -> Operand:
        operand = self.where[node.inputs[0]]
        view = node.op.view(operand.type, operand.strides)
        if view is None:
            operand = self.copy(operand, node, Window.dense(operand.type))
            view = node.op.view(operand.type, operand.strides)
            assert view is not None, f"{node.op.name} has no view of a dense input"
        type = node.outputs[0].type
        strides = type.strides if Window(type, view.strides).is_dense else view.strides
        holds = operand.written if operand.written != type.dtype else None
        return Operand(operand.value, operand.offset + view.offset, type, strides, holds)

    def copy(self, operand: Operand, node: Node, layout: Window) -> Operand:
        """A copy of a window that lies in a certain way, made once."""
        if (operand, layout) not in self.copies:
            kind = node.outputs[0].kind
            name = f"{node.name}/dense" if layout.is_dense else f"{node.name}/image"
            self.copies[operand, layout] = self.copy_to(operand, name, CATEGORIES[kind], p.Role.TRANSIENT, layout)
        return self.copies[operand, layout]

    def act(
        self,
        op: Op,
        kernel: Candidate,
        price: int,
        inputs: Sequence[Operand],
        outputs: Sequence[Operand],
        name: str,
        source: str,
    ) -> None:
        reads = tuple(dict.fromkeys(operand.value for operand in inputs))
        writes = tuple(operand.value for operand in outputs)
        pairs = [
            p.Overwrite(o, reads.index(inputs[i].value), op.completes or self.values[writes[o]].home == inputs[i].value)
            for o, i in kernel.overwrites
            if self.may_overwrite(inputs, i, outputs[o])
            and all((o, j) in kernel.overwrites for j, x in enumerate(inputs) if x.value == inputs[i].value)
        ]
        parts = [
            p.Part(o, reads.index(inputs[i].value), byte)
            for o, i, byte in kernel.parts
            if self.may_lie_within(inputs, i, outputs[o], byte)
        ]
        cost = self.cost(op, inputs, outputs)
        self.actions.append(
            p.Action(
                name=name,
                reads=reads,
                writes=writes,
                overwrites=tuple(dict.fromkeys(pairs)),
                workspace=kernel.workspace,
                workspace_region=ARENA,
                flops=cost.flops,
                nbytes=cost.nbytes,
                nanoseconds=price,
                effect=any(self.values[value].home >= 0 for value in writes),
                parts=tuple(parts),
            )
        )
        self.calls.append(Call(op, kernel.name, tuple(inputs), tuple(outputs), name, source, kernel.payload))

    def may_overwrite(self, inputs: Sequence[Operand], index: int, output: Operand) -> bool:
        """Only a whole, dense value that the kernel sees once, in the same region; a stored value only by its own next
        content.
        """
        taken = inputs[index]
        old, new = self.values[taken.value], self.values[output.value]
        alone = all(x == taken for x in inputs if x.value == taken.value)
        allowed = new.home == taken.value if old.role is p.Role.STORED or new.home >= 0 else True
        alike = (taken.window.is_dense and output.window.is_dense) or taken.window == output.window
        whole = alike and self.is_whole(taken)
        return whole and alone and allowed and old.region == new.region and old.role is not p.Role.OUTPUT

    def is_whole(self, operand: Operand) -> bool:
        """Whether it is all of a value, without gaps."""
        whole = operand.offset == 0 and operand.type.nbytes == self.values[operand.value].nbytes
        return whole and operand.window.is_compact

    def may_lie_within(self, inputs: Sequence[Operand], index: int, output: Operand, byte: int) -> bool:
        """Only a whole, dense value that lives within the step and that the kernel sees once, at an aligned place."""
        part = inputs[index]
        old, new = self.values[part.value], self.values[output.value]
        alone = sum(x.value == part.value for x in inputs) == 1
        mortal = old.role is p.Role.TRANSIENT and new.home < 0 and old.region == new.region
        dense = self.is_whole(part) and part.window.is_dense and output.window.is_dense
        return dense and alone and mortal and part.type.size > 0 and byte % old.alignment == 0

    def cost(self, op: Op, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Cost:
        return op.cost([x.type for x in inputs], [x.type for x in outputs])

    def finish_updates(self) -> None:
        """Copy new contents home where no kernel wrote them there. A content that lies in another stored value's place
        is saved before."""
        left = {}
        for old, new in self.graph.updates.items():
            operand, home = self.where[new], self.where[old].value
            if self.values[operand.value].home == home and operand.type.nbytes == self.values[home].nbytes:
                continue
            if self.values[operand.value].role is p.Role.STORED:
                operand = self.copy_to(operand, f"{new.name}/saved", p.Category.ACTIVATIONS, p.Role.TRANSIENT)
            left[old] = operand
        for old, operand in left.items():
            index = self.new_value(
                f"{old.name}/next",
                old.type.nbytes,
                CATEGORIES[old.kind],
                p.Role.OUTPUT,
                region_of(old.kind),
                self.where[old].value,
            )
            written = Operand(index, 0, old.type, old.type.strides)
            self.act_copy(operand, written, f"{old.name}/update")

    def copy_to(
        self, operand: Operand, name: str, category: p.Category, role: p.Role, layout: Window | None = None
    ) -> Operand:
        """A copy, in C order unless other strides are given."""
        index = self.new_value(name, operand.type.nbytes, category, role, ARENA)
        written = Operand(index, 0, operand.type, operand.type.strides if layout is None else layout.strides)
        self.act_copy(operand, written, f"{name}/copy")
        return written

    def act_copy(self, operand: Operand, written: Operand, name: str) -> None:
        """The action of a copy."""
        kernel, price = self.candidates(COPY, [operand], [written])[0]
        self.act(COPY, replace(kernel, overwrites=()), price, [operand], [written], name, "")

    def result(self, name: str, value: Value, category: p.Category) -> Slot:
        """A value that is there at the end of the step; it is copied if it could be overwritten before."""
        operand = self.where[value]
        root = self.values[operand.value]
        if root.role in (p.Role.INPUT, p.Role.STORED):
            operand = self.copy_to(operand, f"{name}/result", category, p.Role.OUTPUT)
        elif root.role is p.Role.TRANSIENT:
            self.values[operand.value] = replace(root, role=p.Role.OUTPUT, category=category)
        return Slot(name, operand, Kind.GRADIENT if category is p.Category.GRADIENTS else Kind.ACTIVATION)
