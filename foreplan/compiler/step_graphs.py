"""From a model and options to the graphs of a step, and to its program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from foreplan import passes
from foreplan.base.arguments import instance
from foreplan.base.collection import without_collection
from foreplan.base.errors import UsageError
from foreplan.base.patterns import Selection
from foreplan.compiler.prices import adds_little
from foreplan.graph import Graph
from foreplan.lower import Program, chosen_target, engine_info, lower
from foreplan.lower.exchanges import goes_on_beside
from foreplan.lower.node_times import NodeTimes
from foreplan.options import Options
from foreplan.options.ranks import check_trained, forward_stage_of, ranks_of, storage_of
from foreplan.passes import Fission
from foreplan.passes.loss_scale import is_scaled
from foreplan.passes.ranks import by_pass, uses_of_gradients
from foreplan.passes.stages import Layout, laid_out, stage_step

Watch = Callable[[passes.Ran], None]
A_MODEL = "make one with from_onnx(path), trace(function, *specs) or models.build(name)"
_BEFORE_TARGET = (passes.Stage.FORWARD, passes.Stage.MEMORY, passes.Stage.TRAINING)


def step_graphs(graph: Graph, options: Options, watch: Watch | None = None) -> tuple[Graph, Graph | None]:
    """The graph of a step in the form that is lowered for its target, and that of the update if the step has
    micro-batches.

    Args:
        watch: sees every pass that runs.

    Raises:
        ForeplanError: it cannot be made; says what and where.
    """
    if options.accumulate == "auto":
        raise UsageError("the number of micro-batches is found when a step is compiled: say one here (accumulate=2)")
    machine = chosen_target(options.target, accuracy=options.accuracy)
    with without_collection():
        step, last = graphs_of_step(graph, options, watch)
        beside = goes_on_beside(options.links, machine.profile)
        settings, stages = passes.Settings(machine=machine, beside=beside), (passes.Stage.TARGET,)
        step = passes.run_passes(step, settings, stages, passes=options.passes, watch=watch)
        last = last and passes.run_passes(last, settings, stages, passes=options.passes, watch=watch)
        return step, last


def graphs_of_step(graph: Graph, options: Options, watch: Watch | None = None) -> tuple[Graph, Graph | None]:
    """The graph of a step, and that of the update if the step has micro-batches and no stages."""
    if options.stages > 1:
        return stage_of_step(graph, options, watch), None
    if options.stage:
        raise UsageError(f"stage={options.stage} is one of several: say how many there are, such as stages=4")
    if options.accumulate != 1:
        return halves(graph, options, watch)
    if options.loss is not None or graph.loss is not None:
        return training_step(graph, options, watch), None
    if options.optimizer is not None:
        raise UsageError("an optimizer needs a loss to minimise: pass loss=, for example losses.cross_entropy")
    return forward_graph(graph, options, watch), None


def training_step(graph: Graph, options: Options, watch: Watch | None = None) -> Graph:
    """The step, with as much of it in parts as costs next to nothing."""
    settings = training_settings(graph, options)
    with without_collection():
        return _formed(graph, replace(settings, fission=_free_fission(graph, settings, options)), options, watch)


def _free_fission(graph: Graph, settings: passes.Settings, options: Options) -> Fission:
    """What runs in parts without a budget: dominant activations, where that adds next to no time on the target."""
    if not options.splits:
        return Fission.OFF
    wide = replace(settings, dtype=passes.PRECISIONS["float32"])  # precision comes behind it
    forward = passes.run_passes(graph, wide, (passes.Stage.FORWARD, passes.Stage.MEMORY), passes=options.passes)
    if passes.split_channels(forward) is forward:
        return Fission.OFF
    forms = (_formed(graph, replace(settings, fission=form), options, None) for form in (Fission.OFF, Fission.CHANNELS))
    whole, split = (lowered(form, options.unnamed) for form in forms)
    return Fission.CHANNELS if adds_little(whole, split) else Fission.OFF


def halves(graph: Graph, options: Options, watch: Watch | None = None) -> tuple[Graph, Graph]:
    """What runs for each micro-batch of a step, and the update after them."""
    optimizer = options.optimizer
    if optimizer is None or (options.loss is None and graph.loss is None):
        raise UsageError(
            "gradients are accumulated for an update: pass a loss and an optimizer, or leave accumulate out"
        )
    if options.gradients:
        raise UsageError("each micro-batch has gradients of inputs of its own: leave gradients or accumulate out")
    settings, accumulation = training_settings(graph, options), passes.Accumulation()
    settings = replace(settings, fission=_free_fission(graph, settings, options))
    uses = uses_of_gradients(optimizer, ranks_of(options), accumulation.consume)
    settings = replace(settings, consume=uses.of_micro_batch, sharding=uses.sharding, accumulation=accumulation)
    body = _formed(graph, settings, options, watch)
    update = accumulation.update(body, uses.of_sums)
    if uses.sharding is not None:
        update = uses.sharding.with_homes(update, by_pass(()))
    return passes.with_same_stored(body, passes.simplified(update))


def stage_of_step(graph: Graph, options: Options, watch: Watch | None = None) -> Graph:
    """What one stage of several runs in a step, for all micro-batches.

    Raises:
        UsageError: options do not go with stages, or the model has fewer operations than stages.
    """
    _check_stages(graph, options)
    settings, optimizer = training_settings(graph, options), options.optimizer
    assert optimizer is not None
    price = _prices(options)
    scaled = is_scaled(settings.dtype)

    def stage(forward: Graph) -> Graph:
        layout = laid_out(forward, options.stages, price)
        return stage_step(layout, options.stage, int(options.accumulate), optimizer, scaled, ranks_of(options))

    return _formed(graph, replace(settings, stage=stage), options, watch)


def layout_of(graph: Graph, options: Options) -> Layout:
    """How a model is cut into stages.

    Raises:
        UsageError: see `stage_of_step`.
    """
    _check_stages(graph, options)
    settings = training_settings(graph, options)
    stages = (passes.Stage.FORWARD, passes.Stage.MEMORY)
    with without_collection():
        forward = passes.run_passes(graph, settings, stages, passes=options.passes)
        return laid_out(forward, options.stages, _prices(options))


def _prices(options: Options) -> NodeTimes:
    """What nodes take, by which stages are cut."""
    return NodeTimes(chosen_target(options.target, tune=options.tune, accuracy=options.accuracy), options.links)


_NOT_WITH_STAGES = ("outputs", "gradients", "checkpoint", "keep", "recompute", "to_host", "offload", "split")


def _check_stages(graph: Graph, options: Options) -> None:
    """Check that options go with stages."""
    stages, ranks = options.stages, options.ranks
    if options.optimizer is None or (options.loss is None and graph.loss is None):
        raise UsageError(f"stages={stages} are of a training step: pass a loss and an optimizer, or leave stages out")
    if options.accumulate == "auto":
        raise UsageError(f"stages={stages} need a number of micro-batches: say one (accumulate={4 * stages})")
    if ranks % stages:
        less, more = ranks - ranks % stages, ranks + -ranks % stages
        fitting = f"ranks={less} or ranks={more}" if less else f"ranks={more}"
        raise UsageError(
            f"ranks={ranks} do not divide into stages={stages}: each stage has as many ranks as the others, so take "
            f"{fitting}"
        )
    if (ranks // stages) % options.tensor:
        raise UsageError(
            f"tensor={options.tensor} does not divide the {ranks // stages} rank(s) of each stage: take "
            f"ranks={options.tensor * stages} or a multiple of it"
        )
    if options.stage >= stages:
        raise UsageError(f"stage={options.stage} is none of {stages} stages, from 0 to {stages - 1}")
    for name in _NOT_WITH_STAGES:
        if getattr(options, name):
            raise UsageError(
                f"{name} is for a step that one rank runs whole, and not for stages={stages}: leave it out"
            )


def forward_graph(graph: Graph, options: Options, watch: Watch | None = None) -> Graph:
    """The forward pass alone."""
    instance("a model", graph, Graph, A_MODEL)
    if options.gradients:
        raise UsageError("gradients are of a loss, and this is inference: pass a loss, or leave gradients out")
    names = None if options.outputs is None else tuple(options.outputs)
    storage = storage_of(options)
    settings = passes.Settings(
        names,
        dtype=passes.PRECISIONS[options.precision],
        selection=options.selection,
        loops=_has_loops(options),
        split=options.parts,
        ranks=storage.ranks,
        storage=storage,
        stage=forward_stage_of(options),
    )
    return _formed(graph, settings, options, watch)


def training_settings(graph: Graph, options: Options) -> passes.Settings:
    """The settings of the passes for a training step; checks the options before."""
    from foreplan.frontend.losses import attach_loss

    instance("a model", graph, Graph, A_MODEL)
    optimizer = options.optimizer
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "learning_rate")):
        raise UsageError(f"the optimizer must be one such as optim.Nesterov(0.1), and is {optimizer!r}")
    check_trained(options)
    names = tuple(options.outputs or ())
    passes.select_outputs(graph, names)  # a wrong name is told before anything else is done
    uses = None if optimizer is None else uses_of_gradients(optimizer, ranks_of(options), passes.Accumulation().consume)
    return passes.Settings(
        outputs=names,
        selection=options.selection,
        gradients=tuple(options.gradients),
        narrow_weights=options.narrow_weights,
        frozen_statistics=options.batch_norm == "frozen",
        shared_statistics=options.batch_norm == "sync",
        attach=None if options.loss is None else partial(attach_loss, loss=options.loss),
        trains=True,
        consume=None if uses is None else uses.of_step,
        ranks=ranks_of(options),
        sharding=None if uses is None else uses.sharding,
        dtype=passes.PRECISIONS[options.precision],
        loops=_has_loops(options),
        split=options.parts,
    )


def weights_as_trained(graph: Graph, selection: Selection, narrow_weights: bool) -> Graph:
    """A model whose weights are those that a training step keeps, so that sessions can share them."""
    graph = passes.quantised_weights(passes.choose_trained(graph, selection))
    return graph if narrow_weights else passes.master_weights(graph)


def _has_loops(options: Options) -> bool:
    """Whether the engine runs loops; what is no target is told where it is lowered."""
    return engine_info(str(getattr(options.target, "name", options.target))).loops


def _formed(graph: Graph, settings: passes.Settings, options: Options, watch: Watch | None) -> Graph:
    return passes.run_passes(graph, settings, _BEFORE_TARGET, passes=options.passes, watch=watch)


def lowered(graph: Graph, options: Options, prefetch: bool = True) -> Program:
    """The program of a step's graph."""
    return lower(
        graph,
        options.target,
        named=options.named,
        offload=options.offload,
        prefetch=prefetch and options.prefetch,
        prepack=options.prepack,
        tune=options.tune,
        accuracy=options.accuracy,
        workspace=options.workspace,
        links=options.links,
        passes=options.passes,
    )
