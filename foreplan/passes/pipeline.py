"""Lists of passes: how they run and are changed, and those that help every graph.

    for each in entries: graph = each.step(graph)

`foreplan/compiler/pipeline.py` has the list of a step. What any pass gives is held against the rules of `verify_graph`,
and a result that breaks one is a `ModelError`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from foreplan.base.arguments import shown
from foreplan.base.errors import ForeplanError, UsageError
from foreplan.graph import Graph
from foreplan.passes.accumulate import accumulate
from foreplan.passes.base import KNOWN, Pass, Property
from foreplan.passes.decompose import Decompose, Machine
from foreplan.passes.delay_reshapes import delay_reshapes
from foreplan.passes.expand_gradients import expand_gradients
from foreplan.passes.fold_transposes import fold_transposes
from foreplan.passes.fuse_conv_maps import FuseConvMaps
from foreplan.passes.fuse_matmul_maps import FuseMatmulMaps
from foreplan.passes.fuse_norm_masks import FuseNormMasks
from foreplan.passes.group_updates import GroupUpdates
from foreplan.passes.hoist_sums import hoist_sums
from foreplan.passes.loops import trim_loops
from foreplan.passes.pack_attention import pack_attention
from foreplan.passes.pack_masks import pack_masks
from foreplan.passes.properties import complaint
from foreplan.passes.push_slices import push_slices
from foreplan.passes.ranks import Beside, OverlapExchanges, always
from foreplan.passes.simplify import fold_constants, fuse_maps, share_common
from foreplan.passes.training import without_marks
from foreplan.passes.wide_gradients import wide_gradients, wide_maps

checked = False  # whether every graph is held against what passes require and ensure: in all tests


class Stage(StrEnum):
    """The purpose of a pass in a list."""

    FORWARD = "forward"  # the model becomes the one that is asked for
    MEMORY = "memory"  # less has to live at once
    TRAINING = "training"  # backward and updates are added
    TARGET = "target"  # ops take the form that an engine has kernels for


@dataclass(frozen=True)
class Entry:
    """A pass in a list, which may have it several times."""

    stage: Stage
    step: Pass

    @property
    def name(self) -> str:
        """Of the pass."""
        return self.step.name


Entries = tuple[Entry, ...]
Change = Callable[[Entries], Entries]  # makes another list

# Passes that help every graph, in the order in which each helps the next. They run after each stage that leaves them
# something to do.
SIMPLIFY: tuple[Pass, ...] = (
    fold_constants,
    share_common,
    push_slices,
    wide_gradients,
    pack_attention,
    accumulate,
    delay_reshapes,
    fuse_maps,
    wide_maps,
    pack_masks,
)
# The form of a forward pass that nobody differentiates.
PLAIN: tuple[Pass, ...] = (expand_gradients, without_marks, hoist_sums, trim_loops, fold_transposes, *SIMPLIFY)


def simplified(graph: Graph) -> Graph:
    """A graph after the passes that help every graph."""
    for each in SIMPLIFY:
        graph = each(graph)
    return graph


def target_passes(machine: Machine, beside: Beside = always) -> Entries:
    """The list of the target's stage.

    Args:
        beside: whether an exchange goes on while the target computes.
    """
    fusing = (kind(machine.fuses) for kind in (FuseConvMaps, FuseMatmulMaps, FuseNormMasks, GroupUpdates))
    return tuple(Entry(Stage.TARGET, each) for each in (Decompose(machine), OverlapExchanges(beside), *fusing))


@dataclass(frozen=True)
class Ran:
    """A pass that ran.

    Attributes:
        entry: of the list.
        graph: its result.
        seconds: of processor time.
        changed: whether that is another graph than before.
    """

    entry: Entry
    graph: Graph
    seconds: float
    changed: bool


def run_passes(
    graph: Graph,
    entries: Iterable[Entry],
    *,
    machine: Machine | None = None,
    watch: Callable[[Ran], None] | None = None,
) -> Graph:
    """A graph after the passes of a list.

    Args:
        machine: the target, of the passes of its stage.
        watch: sees every pass that ran.

    Raises:
        ForeplanError: what a pass requires or ensures does not hold, where that is checked; names both.
    """
    for each in entries:
        _hold(graph, each.step.requires, machine, f"{each.name} requires")
        started, before = time.process_time(), graph
        graph = each.step(graph)
        seconds = time.process_time() - started
        _hold(graph, each.step.ensures, machine, f"{each.name} ensures")
        if watch is not None:
            watch(Ran(each, graph, seconds, graph is not before))
    return graph


def of_stages(entries: Iterable[Entry], stages: Collection[Stage]) -> Entries:
    """The passes of some stages."""
    return tuple(each for each in entries if each.stage in stages)


def changed(entries: Entries, change: Change | None) -> Entries:
    """A list as a change makes it; None: as it is."""
    return entries if change is None else tuple(change(entries))


def without(*names: str) -> Change:
    """A list without some passes, wherever they stand.

    Raises:
        UsageError: there is no such pass, or nothing works without it.
    """
    check_names(names)
    if needed := [name for name in names if not KNOWN[name].optional]:
        raise UsageError(f"nothing works without the pass {needed[0]!r}")
    return lambda entries: tuple(each for each in entries if each.name not in names)


def before(name: str, *steps: Pass) -> Change:
    """A list with further passes before one that it has, where that stands first; they are of its stage.

    Raises:
        UsageError: there is no pass of that name.
    """
    check_names([name])

    def with_steps(entries: Entries) -> Entries:
        at = next((i for i, each in enumerate(entries) if each.name == name), None)
        if at is None:
            return entries
        return (*entries[:at], *(Entry(entries[at].stage, each) for each in steps), *entries[at:])

    return with_steps


def check_change(name: str, value: Any) -> Any:
    """An argument that changes a list of passes, or None.

    Raises:
        UsageError: it is something else.
    """
    if value is not None and not callable(value):
        raise UsageError(f"{name} changes a list of passes, such as passes.without('fuse_maps'), and is {shown(value)}")
    return value


def check_names(names: Iterable[str]) -> None:
    """Check that there are such passes.

    Raises:
        UsageError: there is no pass of a name; lists the names.
    """
    if unknown := [name for name in names if name not in KNOWN]:
        raise UsageError(f"there is no pass {unknown[0]!r}; the passes are {', '.join(sorted(KNOWN))}")


def _hold(graph: Graph, wanted: Iterable[Property], machine: Machine | None, who: str) -> None:
    for each in wanted if checked else ():
        if reason := complaint(each, graph, machine):
            raise ForeplanError(f"the pass {who} that a graph has {each}: {reason}")
