"""The target `cpu`: oneDNN and compiled loops, and NumPy's kernels for ops that have neither."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from foreplan.base.arguments import MOST_THREADS, whole
from foreplan.base.errors import UsageError
from foreplan.base.processor import cores
from foreplan.graph import Op, Window
from foreplan.graph.blocks import Blocks
from foreplan.graph.op import Types
from foreplan.lower.target import Candidate, DeviceProfile, named, predicted
from foreplan.ops.loop import Loop
from foreplan.runtime.loop import loop_candidates, loop_of
from foreplan.runtime.numpy.target import reference, reference_reads


class CpuTarget:
    """The processor of this machine, or some of its threads.

    Attributes:
        name: `cpu`, with the number of threads where it was given: plans depend on it.
        threads: the number that works on each kernel.
        tune: whether kernels and the machine are measured, each once; else all times are predicted.
        strict: whether kernels that multiply sums of numbers are left out, as Winograd's are.
    """

    alignment = 64

    def __init__(self, threads: int | None = None, *, tune: bool = False, strict: bool = False) -> None:
        here = cores()
        self.threads, self.tune = here if threads is None else whole("threads", threads, 1, MOST_THREADS), tune
        self.strict = strict
        self.name = f"cpu:threads={self.threads}{',strict' * strict}"

    @cached_property
    def profile(self) -> DeviceProfile:
        """The speed of the machine: that of one with the same instructions, or measured on this one."""
        from foreplan.runtime.cpu import prices
        from foreplan.runtime.cpu.machine import this_machine

        # A large product and a stream copy; threads share the memory.
        flops, stream = int(prices.rates().peak * 1e9) * self.threads, 12_000_000_000 * min(self.threads, 4)
        if self.tune:
            from foreplan.runtime.cpu import tune

            flops, stream = tune.prices().machine_rates(self.threads)
        machine = this_machine()
        needs = (
            ("instruction set", machine.instruction_set),
            ("oneDNN", machine.onednn),
            ("times", prices.taken_from()),
        )
        return DeviceProfile(self.name, flops, stream, stream // 2, needs)

    @property
    def notes(self) -> tuple[str, ...]:
        """Whose speed this processor is believed to have."""
        from foreplan.base.processor import model
        from foreplan.runtime.cpu import prices

        if self.tune or prices.is_known():
            return ()
        return (
            f"no {model()} was measured: times are predicted as of {prices.USUAL} with the same "
            "instructions; --tune (tune=True) measures this one",
        )

    def fuses(self, op: Op, inputs: Types, outputs: Types) -> bool:
        """Where there is a kernel for the fused op."""
        from foreplan.runtime.cpu.table import family_of

        return family_of(op, inputs, outputs, self.threads) is not None

    def reads(self, op: Op, inputs: Sequence[Window], outputs: Types) -> Sequence[Window]:
        """As the kernel says."""
        from foreplan.runtime.cpu.table import reads_of

        found = reads_of(op, inputs, outputs, self.threads)
        return reference_reads(op, inputs) if found is None else found

    def layouts(self, op: Op, inputs: Sequence[Window], outputs: Types) -> Sequence[Window]:
        """Images with their channels last if the kernel has that; else in C order."""
        from foreplan.runtime.cpu.table import family_of

        family = family_of(op, [x.type for x in inputs], outputs, self.threads)
        return family.layout(op, inputs, outputs) if family else [Window.dense(type) for type in outputs]

    def kernels(self, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Candidate]:
        """The kernels of the op's family, the one predicted to be the fastest first; or the reference kernel; or the
        plan of a loop's body.
        """
        from foreplan.runtime.cpu.table import TRANSFORMED, kernels_for

        found = kernels_for(op, inputs, outputs, self.threads)
        made = [
            Candidate(name, k.workspace, k.overwrites, getattr(k, "parts", ()), getattr(k, "nanoseconds", None))
            for name, k in found.items()
            if name not in TRANSFORMED or not self.strict
        ]
        own = sorted(made, key=lambda kernel: kernel.nanoseconds or 0)
        if any(x.blocks is not None for x in inputs):
            return own
        return own or reference(op, inputs, outputs) or loop_candidates(op, self.name)

    def kernel(
        self, op: Op, name: str, payload: bytes, inputs: Sequence[Window], outputs: Sequence[Window]
    ) -> Candidate | None:
        """The kernel of that name, or a loop with the plan that the payload holds."""
        if isinstance(op, Loop):
            return named((loop_of(op, self.name, payload).candidate,), name, payload)
        return named(self.kernels(op, inputs, outputs), name, payload)

    def blocks(self, op: Op, index: int, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Blocks]:
        """Those in which kernels of products and convolutions would have their second factor, their weights."""
        from foreplan.runtime.cpu.table import blocks_for

        return blocks_for(op, inputs, outputs, self.threads) if index == 1 else ()

    def price(self, op: Op, kernel: Candidate, inputs: Sequence[Window], outputs: Sequence[Window]) -> int:
        """Measured or predicted; NumPy's kernels are always predicted."""
        from foreplan.runtime.cpu.table import kernels_for

        found = kernels_for(op, inputs, outputs, self.threads).get(kernel.name) if self.tune else None
        if found is None:
            return predicted(self.profile, op, kernel, inputs, outputs)
        from foreplan.runtime.cpu.tune import prices

        return prices().kernel(op, kernel.name, found, inputs, outputs, self.threads)


def target(options: str = "", tune: bool = False) -> CpuTarget:
    """The target, with the threads that `threads=2` names, or as many as there are processors; and `strict`.

    Raises:
        UsageError: there is no such option.
    """
    given = options.split(",") if options else []
    counts = [text.removeprefix("threads=") for text in given if text.startswith("threads=")]
    others = [text for text in given if not text.startswith("threads=") and text != "strict"]
    if others or len(counts) > 1 or not all(text.isascii() and text.isdigit() for text in counts):
        raise UsageError(f"the target cpu has no option {options!r}; `cpu:threads=2` is one")
    return CpuTarget(int(counts[0]) if counts else None, tune=tune, strict="strict" in given)
