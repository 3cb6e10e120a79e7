"""The passes between a model and lowering: one list, in the order in which they run.

    for each in PASSES: graph = each.run(graph, settings), where each.applies(settings)

Passes that help every graph (`SIMPLIFY`) run after each stage that leaves them something to do, so a pass may stand in
several places of the list. What any pass gives is held against the rules of `verify_graph`, and a result that breaks
one is a `ModelError`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from foreplan.base.arguments import shown
from foreplan.base.errors import ForeplanError, UnsupportedError, UsageError
from foreplan.graph import Graph
from foreplan.graph.types import FLOAT32
from foreplan.passes.accumulate import accumulate
from foreplan.passes.autodiff import differentiate
from foreplan.passes.choose_trained import choose_trained, freeze_statistics
from foreplan.passes.chunk_loss import chunk_losses
from foreplan.passes.decompose import decompose
from foreplan.passes.delay_reshapes import delay_reshapes
from foreplan.passes.expand_gradients import expand_gradients
from foreplan.passes.fold_transposes import fold_transposes
from foreplan.passes.fuse_attention import fuse_attention
from foreplan.passes.fuse_conv_maps import fuse_conv_maps
from foreplan.passes.fuse_matmul_maps import fuse_matmul_maps
from foreplan.passes.fuse_norm_masks import fuse_norm_masks
from foreplan.passes.group_updates import group_updates
from foreplan.passes.hoist_sums import hoist_sums
from foreplan.passes.loops import trim_loops, write_out_loops
from foreplan.passes.loss_scale import is_scaled
from foreplan.passes.master_weights import master_weights
from foreplan.passes.pack_attention import pack_attention
from foreplan.passes.pack_masks import pack_masks
from foreplan.passes.precision import with_precision
from foreplan.passes.properties import Property, complaint
from foreplan.passes.push_slices import push_slices
from foreplan.passes.quantised_weights import quantised_weights
from foreplan.passes.ranks import (
    by_pass,
    mean_of_all,
    overlap_exchanges,
    share_of_mean,
    sum_gradients,
    sync_batch_norm,
)
from foreplan.passes.select import select_outputs
from foreplan.passes.settings import Fission, Settings
from foreplan.passes.simplify import fold_constants, fuse_maps, share_common
from foreplan.passes.split import split_segments
from foreplan.passes.split_channels import split_channels, split_pieces
from foreplan.passes.split_concats import split_concats
from foreplan.passes.split_samples import (
    in_turn,
    split_bands,
    split_few,
    split_logits,
    split_samples,
    split_to_loss,
)
from foreplan.passes.tensor import gather_again, split_products
from foreplan.passes.training import training_form, without_marks
from foreplan.passes.wide_gradients import wide_gradients, wide_maps


class Stage(StrEnum):
    """The purpose of a pass."""

    FORWARD = "forward"  # the model becomes the one that is asked for
    MEMORY = "memory"  # less has to live at once
    TRAINING = "training"  # backward and updates are added
    TARGET = "target"  # ops take the form that an engine has kernels for


_IN_TURN = (Fission.FEW, Fission.SAMPLES, Fission.ROWS, Fission.BANDS)


def _always(settings: Settings) -> bool:
    return True


@dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
        name: for people, and for `--without`; a pass that stands in several places has one name.
        stage: see this module.
        run: graph → graph.
        applies: whether it runs, given what is asked for.
        requires, ensures: properties of the graph before and behind it, which `run_passes` checks when asked.
        optional: whether a step is right without it.
    """

    name: str
    stage: Stage
    run: Callable[[Graph, Settings], Graph]
    applies: Callable[[Settings], bool] = _always
    requires: tuple[Property, ...] = ()
    ensures: tuple[Property, ...] = ()
    optional: bool = False


def _plain(function: Callable[[Graph], Graph], stage: Stage, applies: Callable[[Settings], bool] = _always) -> Pass:
    """An optional pass that needs nothing but the graph."""
    return Pass(function.__name__, stage, lambda graph, settings: function(graph), applies, optional=True)


def _trains(settings: Settings) -> bool:
    return settings.trains


def _trains_with_others(settings: Settings) -> bool:
    return settings.trains and settings.ranks.count > 1


def _computes_in_parts(settings: Settings) -> bool:
    return settings.trains and settings.ranks.tensor > 1


def _infers(settings: Settings) -> bool:
    return not settings.trains


def _select(graph: Graph, settings: Settings) -> Graph:
    return graph if settings.outputs is None else select_outputs(graph, settings.outputs)


def _mean_loss(graph: Graph, settings: Settings) -> Graph:
    assert settings.accumulation is not None
    return settings.accumulation.with_mean_loss(graph)


def _differentiate(graph: Graph, settings: Settings) -> Graph:
    written = [value.name for value in graph.parameters if value in graph.updates]
    if written and (settings.stage is not None or settings.sharding is not None):
        raise UnsupportedError(
            f"the forward pass writes {written[0]!r}, of which ranks have parts or copies; leave out shard and "
            f"stages, or freeze=[{written[0]!r}]"
        )
    if settings.stage is not None:
        return settings.stage(graph)
    sharding, forward = settings.sharding, set(graph.nodes)
    if sharding is not None:
        sharding.lay_out(graph, differentiate(graph).gradients)
    step = differentiate(graph, settings.consume, is_scaled(settings.dtype), settings.gradients)
    if settings.to_loss or settings.fission in _IN_TURN:
        step = in_turn(step, forward)
    return step if sharding is None else sharding.with_homes(step, by_pass(forward))


def _decompose(graph: Graph, settings: Settings) -> Graph:
    assert settings.machine is not None
    return decompose(graph, settings.machine)


def _fusing(fuse: Callable[[Graph, Callable[..., bool]], Graph]) -> Pass:
    """A pass that makes one op of several, if the target has a kernel for it."""

    def run(graph: Graph, settings: Settings) -> Graph:
        assert settings.machine is not None
        return fuse(graph, settings.machine.fuses)

    return Pass(fuse.__name__, Stage.TARGET, run, optional=True)


# Passes that help every graph, in the order in which each helps the next.
SIMPLIFY: tuple[Callable[[Graph], Graph], ...] = (
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


def _simplify(stage: Stage, applies: Callable[[Settings], bool] = _always) -> tuple[Pass, ...]:
    return tuple(_plain(function, stage, applies) for function in SIMPLIFY)


PASSES: tuple[Pass, ...] = (
    Pass("choose_trained", Stage.FORWARD, lambda g, s: choose_trained(g, s.selection), lambda s: bool(s.selection)),
    Pass("quantised_weights", Stage.FORWARD, lambda g, s: quantised_weights(g), _trains),
    Pass("master_weights", Stage.FORWARD, lambda g, s: master_weights(g), lambda s: s.trains and not s.narrow_weights),
    Pass("attach_loss", Stage.FORWARD, lambda g, s: s.attach(g) if s.attach else g, _trains, ensures=("loss",)),
    Pass("select_outputs", Stage.FORWARD, _select),
    Pass("freeze_statistics", Stage.FORWARD, lambda g, s: freeze_statistics(g, s.frozen_statistics), _trains),
    _plain(write_out_loops, Stage.FORWARD, lambda s: not s.loops or s.dtype != FLOAT32),
    Pass(
        "training_form",
        Stage.FORWARD,
        lambda g, s: training_form(g, s.ranks.count if s.shared_statistics and _trains_with_others(s) else 1),
        _trains,
        ensures=("training form",),
    ),
    Pass(
        "sync_batch_norm",
        Stage.FORWARD,
        lambda g, s: sync_batch_norm(g, s.ranks.count),
        lambda s: s.shared_statistics and _trains_with_others(s),
        requires=("training form",),
    ),
    Pass("expand_gradients", Stage.FORWARD, lambda g, s: expand_gradients(g)),
    Pass("without_marks", Stage.FORWARD, lambda g, s: without_marks(g), _infers),
    _plain(hoist_sums, Stage.FORWARD, _infers),
    _plain(trim_loops, Stage.FORWARD, _infers),
    _plain(fold_transposes, Stage.FORWARD),
    *_simplify(Stage.FORWARD),
    _plain(fuse_attention, Stage.MEMORY),
    Pass(
        "split_products",
        Stage.MEMORY,
        lambda g, s: split_products(g, s.ranks.tensor, s.storage.lies),
        lambda s: s.ranks.tensor > 1,
    ),
    Pass("split_to_loss", Stage.MEMORY, lambda g, s: split_to_loss(g, s.to_loss), lambda s: bool(s.to_loss)),
    _plain(split_few, Stage.MEMORY, lambda s: s.trains and s.fission is Fission.FEW),
    _plain(split_samples, Stage.MEMORY, lambda s: s.trains and s.fission in (Fission.SAMPLES, Fission.ROWS)),
    Pass(
        "split_bands",
        Stage.MEMORY,
        lambda g, s: split_bands(g, s.bands),
        lambda s: s.trains and s.fission is Fission.BANDS,
    ),
    _plain(split_logits, Stage.MEMORY, lambda s: s.trains and s.fission is Fission.ROWS),
    # In chunks gradients would be rounded without their scale.
    _plain(chunk_losses, Stage.MEMORY, lambda s: s.trains and not is_scaled(s.dtype)),
    _plain(split_concats, Stage.MEMORY),
    Pass("split_segments", Stage.MEMORY, lambda g, s: split_segments(g, s.segments), lambda s: bool(s.segments)),
    _plain(split_channels, Stage.MEMORY, lambda s: s.trains and s.fission is Fission.CHANNELS),
    _plain(split_pieces, Stage.MEMORY, lambda s: s.trains and s.fission is Fission.PIECES),
    *_simplify(Stage.MEMORY, _infers),
    Pass("with_precision", Stage.MEMORY, lambda g, s: with_precision(g, s.dtype), lambda s: s.dtype != FLOAT32),
    Pass("cut_into_stages", Stage.MEMORY, lambda g, s: g if s.stage is None else s.stage(g), _infers),
    Pass("lay_out_weights", Stage.MEMORY, lambda g, s: s.storage.laid_out(g), _infers),
    Pass("share_of_mean", Stage.MEMORY, lambda g, s: share_of_mean(g, s.ranks.count), _trains_with_others),
    Pass(
        "differentiate",
        Stage.TRAINING,
        _differentiate,
        _trains,
        requires=("loss", "training form"),
        ensures=("backward",),
    ),
    _plain(gather_again, Stage.TRAINING, _computes_in_parts),
    Pass("sum_gradients", Stage.TRAINING, lambda g, s: sum_gradients(g, s.ranks), _trains_with_others),
    Pass("without_marks", Stage.TRAINING, lambda g, s: without_marks(g), _trains),
    _plain(hoist_sums, Stage.TRAINING, _trains),
    _plain(trim_loops, Stage.TRAINING, _trains),
    Pass("mean_loss", Stage.TRAINING, _mean_loss, lambda s: s.accumulation is not None),
    Pass("mean_of_all", Stage.TRAINING, lambda g, s: mean_of_all(g, s.ranks.count), _trains_with_others),
    *_simplify(Stage.TRAINING, lambda s: s.trains or s.dtype != FLOAT32),
    Pass("decompose", Stage.TARGET, _decompose, ensures=("kernels",)),
    Pass("overlap_exchanges", Stage.TARGET, lambda g, s: overlap_exchanges(g, s.beside), optional=True),
    *(_fusing(fuse) for fuse in (fuse_conv_maps, fuse_matmul_maps, fuse_norm_masks, group_updates)),
)
NAMES = tuple(dict.fromkeys(each.name for each in PASSES))


@dataclass(frozen=True)
class Ran:
    """A pass that ran.

    Attributes:
        step: the pass, in the list.
        graph: its result.
        seconds: of processor time.
        changed: whether that is another graph than before.
    """

    step: Pass
    graph: Graph
    seconds: float
    changed: bool


def run_passes(
    graph: Graph,
    settings: Settings,
    stages: Collection[Stage],
    *,
    passes: Iterable[Pass] | None = None,
    check: bool = False,
    watch: Callable[[Ran], None] | None = None,
) -> Graph:
    """A graph after the passes of some stages, in the list's order.

    Args:
        passes: another list than PASSES, for experiments.
        check: whether to check what passes require and ensure.
        watch: sees every pass that ran.

    Raises:
        ForeplanError: what a pass requires or ensures does not hold; names both.
    """
    for each in PASSES if passes is None else passes:
        if each.stage not in stages or not each.applies(settings):
            continue
        _hold(graph, settings, each.requires if check else (), f"{each.name} requires")
        started, before = time.process_time(), graph
        graph = each.run(graph, settings)
        seconds = time.process_time() - started
        _hold(graph, settings, each.ensures if check else (), f"{each.name} ensures")
        if watch is not None:
            watch(Ran(each, graph, seconds, graph.as_text() != before.as_text()))
    return graph


def training_forms(
    graph: Graph, settings: Settings, *, passes: Iterable[Pass] | None = None
) -> Callable[[Fission, int], Graph | None]:
    """What makes the training step of a model with some of it in parts: in how many bands, if any.

    Returns:
        A function. It gives None where parts change nothing in the forward pass of a step that it gave before.
    """
    start = run_passes(graph, settings, (Stage.FORWARD,), passes=passes)
    seen: set[str] = set()

    def made(fission: Fission, bands: int) -> Graph | None:
        chosen = replace(settings, fission=fission, bands=bands)
        forward = run_passes(start, chosen, (Stage.MEMORY,), passes=passes)
        if (text := forward.as_text()) in seen:
            return None
        seen.add(text)
        return run_passes(forward, chosen, (Stage.TRAINING,), passes=passes)

    return made


def check_passes(name: str, value: Any) -> Any:
    """An argument that is another list of passes, or None.

    Raises:
        UsageError: it is something else.
    """
    listed = isinstance(value, Sequence) and all(isinstance(each, Pass) for each in value)
    if value is not None and not listed:
        raise UsageError(f"{name} is a list of passes, such as foreplan.passes.PASSES, and is {shown(value)}")
    return value


def check_names(names: Iterable[str]) -> None:
    """Check that there are such passes.

    Raises:
        UsageError: there is no pass of a name; lists the names.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise UsageError(f"there is no pass {unknown[0]!r}; the passes are {', '.join(NAMES)}")


def list_without(names: Iterable[str]) -> tuple[Pass, ...]:
    """The list without some passes.

    Raises:
        UsageError: there is no such pass, or nothing works without it.
    """
    left_out = tuple(names)
    check_names(left_out)
    if needed := [name for name in left_out if name in {each.name for each in PASSES if not each.optional}]:
        raise UsageError(f"nothing works without the pass {needed[0]!r}")
    return tuple(each for each in PASSES if each.name not in left_out)


def _hold(graph: Graph, settings: Settings, wanted: Iterable[Property], who: str) -> None:
    for each in wanted:
        if reason := complaint(each, graph, settings.machine):
            raise ForeplanError(f"the pass {who} that a graph has {each}: {reason}")


def simplified(graph: Graph) -> Graph:
    """A graph after the passes that help every graph."""
    for function in SIMPLIFY:
        graph = function(graph)
    return graph
