"""The list of passes of a step: from its options, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from foreplan.graph import Graph
from foreplan.graph.types import FLOAT32
from foreplan.lower import chosen_target, engine_info
from foreplan.lower.node_times import NodeTimes
from foreplan.options import Options
from foreplan.options.ranks import forward_stage_of, ranks_of, storage_of
from foreplan.passes.autodiff import Differentiate
from foreplan.passes.base import Pass
from foreplan.passes.choose_trained import ChooseTrained, FreezeStatistics
from foreplan.passes.chunk_loss import chunk_losses
from foreplan.passes.expand_gradients import expand_gradients
from foreplan.passes.fold_transposes import fold_transposes
from foreplan.passes.fuse_attention import fuse_attention
from foreplan.passes.hoist_sums import hoist_sums
from foreplan.passes.loops import trim_loops, write_out_loops
from foreplan.passes.loss_scale import is_scaled
from foreplan.passes.master_weights import master_weights
from foreplan.passes.micro_batches import Accumulation, MeanLoss
from foreplan.passes.pipeline import PLAIN, SIMPLIFY, Entries, Entry, Stage, changed
from foreplan.passes.precision import PRECISIONS, WithPrecision
from foreplan.passes.quantised_weights import quantised_weights
from foreplan.passes.ranks import (
    DifferentiateInParts,
    GradientUses,
    LayOutWeights,
    MeanOfAll,
    ShareOfMean,
    SumGradients,
    SyncBatchNorm,
)
from foreplan.passes.select import SelectOutputs
from foreplan.passes.stages import StageStep
from foreplan.passes.tensor import SplitProducts, gather_again
from foreplan.passes.tile.concats import split_concats
from foreplan.passes.tile.samples import TO_LOSS
from foreplan.passes.tile.segments import SplitSegments, is_to_loss
from foreplan.passes.training import TrainingForm, without_marks

_F, _M, _T = Stage.FORWARD, Stage.MEMORY, Stage.TRAINING


@dataclass(frozen=True)
class AttachLoss(Pass, requires=("forward",), ensures=("forward", "loss")):
    """The model with a loss.

    Attributes:
        loss: as `compile` takes it.
    """

    loss: Any

    def _run(self, graph: Graph) -> Graph:
        from foreplan.frontend.losses import attach_loss

        return attach_loss(graph, self.loss)


def passes_of_inference(options: Options) -> Entries:
    """The list of a forward pass, up to the target's stage.

    Raises:
        UsageError: options mean nothing for inference.
    """
    return changed(tuple(_of_inference(options)), options.passes)


def passes_of_training(
    options: Options,
    tiles: Iterable[Pass] = (),
    uses: GradientUses | None = None,
    accumulation: Accumulation | None = None,
) -> Entries:
    """The list of a training step, up to the target's stage.

    Args:
        tiles: passes that let more run in parts than is asked for.
        uses: what becomes of gradients; None: the step returns them.
        accumulation: of micro-batches, for one of which the graph runs.
    """
    return changed(tuple(_of_training(options, tuple(tiles), uses, accumulation)), options.passes)


def _listed(stage: Stage, *steps: Pass) -> Iterator[Entry]:
    return (Entry(stage, each) for each in steps)


def _of_inference(options: Options) -> Iterator[Entry]:
    storage, dtype = storage_of(options), PRECISIONS[options.precision]
    if options.selection:
        yield Entry(_F, ChooseTrained(options.selection))
    if options.outputs is not None:
        yield Entry(_F, SelectOutputs(tuple(options.outputs)))
    if not has_loops(options) or dtype != FLOAT32:
        yield Entry(_F, write_out_loops)
    yield from _listed(_F, *PLAIN)
    yield Entry(_M, fuse_attention)
    if storage.ranks.tensor > 1:
        yield Entry(_M, SplitProducts(storage.ranks.tensor, storage.lies))
    yield Entry(_M, split_concats)
    if options.parts:
        yield Entry(_M, SplitSegments(dict(options.parts)))
    yield from _listed(_M, *SIMPLIFY)
    if dtype != FLOAT32:
        yield Entry(_M, WithPrecision(dtype))
    if (stage := forward_stage_of(options)) is not None:
        yield Entry(_M, stage)
    yield Entry(_M, LayOutWeights(storage))
    if dtype != FLOAT32:
        yield from _listed(_T, *SIMPLIFY)


def _of_training(
    options: Options, tiles: tuple[Pass, ...], uses: GradientUses | None, accumulation: Accumulation | None
) -> Iterator[Entry]:
    ranks, dtype = ranks_of(options), PRECISIONS[options.precision]
    synced = options.batch_norm == "sync" and ranks.count > 1
    if options.selection:
        yield Entry(_F, ChooseTrained(options.selection))
    yield Entry(_F, quantised_weights)
    if not options.narrow_weights:
        yield Entry(_F, master_weights)
    if options.loss is not None:
        yield Entry(_F, AttachLoss(options.loss))
    yield Entry(_F, SelectOutputs(tuple(options.outputs or ())))
    yield Entry(_F, FreezeStatistics(everywhere=options.batch_norm == "frozen"))
    if not has_loops(options) or dtype != FLOAT32:
        yield Entry(_F, write_out_loops)
    yield Entry(_F, TrainingForm(ranks.count if synced else 1))
    if synced:
        yield Entry(_F, SyncBatchNorm(ranks.count))
    yield from _listed(_F, expand_gradients, fold_transposes, *SIMPLIFY)

    yield Entry(_M, fuse_attention)
    if ranks.tensor > 1:
        yield Entry(_M, SplitProducts(ranks.tensor))
    yield Entry(_M, split_concats)
    if options.parts:
        yield Entry(_M, SplitSegments(dict(options.parts)))
    yield from _listed(_M, *tiles)
    if not is_scaled(dtype):  # in chunks gradients would be rounded without their scale
        yield Entry(_M, chunk_losses)
    if dtype != FLOAT32:
        yield Entry(_M, WithPrecision(dtype))
    if ranks.count > 1:
        yield Entry(_M, ShareOfMean(ranks.count))

    in_turn = any(isinstance(each, TO_LOSS) for each in tiles) or any(is_to_loss(entry) for entry, _ in options.parts)
    yield Entry(_T, _backward(options, in_turn, uses, accumulation))
    if ranks.tensor > 1:
        yield Entry(_T, gather_again)
    if ranks.count > 1:
        yield Entry(_T, SumGradients(ranks))
    yield from _listed(_T, without_marks, hoist_sums, trim_loops)
    if accumulation is not None:
        yield Entry(_T, MeanLoss(accumulation))
    if ranks.count > 1:
        yield Entry(_T, MeanOfAll(ranks.count))
    yield from _listed(_T, *SIMPLIFY)


def _backward(options: Options, in_turn: bool, uses: GradientUses | None, accumulation: Accumulation | None) -> Pass:
    """What adds the backward pass, and what uses its gradients."""
    scaled, ranks = is_scaled(PRECISIONS[options.precision]), ranks_of(options)
    if options.stages > 1:
        assert options.optimizer is not None
        micro_batches = int(options.accumulate)
        return StageStep(
            options.stages, options.stage, micro_batches, options.optimizer, prices_of(options), scaled, ranks
        )
    consume = None if uses is None else uses.of_step if accumulation is None else uses.of_micro_batch
    step = Differentiate(consume, scaled, tuple(options.gradients), in_turn)
    return step if uses is None or uses.sharding is None else DifferentiateInParts(uses.sharding, step)


def prices_of(options: Options) -> NodeTimes:
    """What nodes take, by which stages are cut."""
    return NodeTimes(chosen_target(options.target, tune=options.tune, accuracy=options.accuracy), options.links)


def has_loops(options: Options) -> bool:
    """Whether the engine runs loops; what is no target is told where it is lowered."""
    return engine_info(str(getattr(options.target, "name", options.target))).loops
