"""From a model and options to the graphs of a step, and to its program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from foreplan import passes
from foreplan.base.arguments import instance
from foreplan.base.collection import without_collection
from foreplan.base.errors import UsageError
from foreplan.base.patterns import Selection
from foreplan.compiler.pipeline import passes_of_inference, passes_of_training, prices_of
from foreplan.compiler.prices import adds_little
from foreplan.graph import Graph
from foreplan.lower import Program, chosen_target, lower
from foreplan.lower.exchanges import goes_on_beside
from foreplan.options import Options
from foreplan.options.ranks import check_trained, ranks_of
from foreplan.passes.pipeline import Ran, Stage, changed, of_stages, run_passes, target_passes
from foreplan.passes.properties import is_step
from foreplan.passes.ranks import GradientUses, by_pass, uses_of_gradients
from foreplan.passes.stages import Layout, laid_out

Watch = Callable[[Ran], None]
A_MODEL = "make one with from_onnx(path), trace(function, *specs) or models.build(name)"


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
        entries = changed(target_passes(machine, goes_on_beside(options.links, machine.profile)), options.passes)
        step = run_passes(step, entries, machine=machine, watch=watch)
        return step, last and run_passes(last, entries, machine=machine, watch=watch)


def graphs_of_step(graph: Graph, options: Options, watch: Watch | None = None) -> tuple[Graph, Graph | None]:
    """The graph of a step, and that of the update if the step has micro-batches and no stages.

    A graph that has its backward pass already, such as `differentiate` gives, is the step.

    Raises:
        UsageError: options do not go together, or are of what is done already.
    """
    if isinstance(graph, Graph) and is_step(graph):
        if done := options.given(lambda info: info.of_model):
            raise UsageError(
                f"{done[0]} is for a model, and graph {graph.name!r} has its backward pass already: give the model, or "
                f"say {done[0]} where that is made"
            )
        return graph, None
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
    check_training(graph, options)
    with without_collection():
        entries = passes_of_training(options, _free_tiles(graph, options), uses_of(options))
        return run_passes(graph, entries, watch=watch)


def _free_tiles(graph: Graph, options: Options) -> tuple[passes.Pass, ...]:
    """What runs in parts without a budget: dominant activations, where that adds next to no time on the target."""
    if not options.splits:
        return ()
    wide = replace(options, precision="float32")  # precision comes behind it
    forward = run_passes(graph, of_stages(passes_of_training(wide), (Stage.FORWARD, Stage.MEMORY)))
    if passes.split_channels(forward) is forward:
        return ()
    ways: list[tuple[passes.Pass, ...]] = [(), (passes.split_channels,)]
    forms = (run_passes(graph, passes_of_training(options, tiles, uses_of(options))) for tiles in ways)
    return ways[adds_little(*(lowered(form, options.without_activations) for form in forms))]


def uses_of(options: Options) -> GradientUses | None:
    """What becomes of gradients; None: the step returns them."""
    if options.optimizer is None:
        return None
    return uses_of_gradients(options.optimizer, ranks_of(options), passes.Accumulation().consume)


def halves(graph: Graph, options: Options, watch: Watch | None = None) -> tuple[Graph, Graph]:
    """What runs for each micro-batch of a step, and the update after them."""
    optimizer = options.optimizer
    if optimizer is None or (options.loss is None and graph.loss is None):
        raise UsageError(
            "gradients are accumulated for an update: pass a loss and an optimizer, or leave accumulate out"
        )
    if options.gradients:
        raise UsageError("each micro-batch has gradients of inputs of its own: leave gradients or accumulate out")
    check_training(graph, options)
    accumulation = passes.Accumulation()
    uses = uses_of_gradients(optimizer, ranks_of(options), accumulation.consume)
    entries = passes_of_training(options, _free_tiles(graph, options), uses, accumulation)
    body = run_passes(graph, entries, watch=watch)
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
    check_training(graph, options)
    return run_passes(graph, passes_of_training(options), watch=watch)


def layout_of(graph: Graph, options: Options) -> Layout:
    """How a model is cut into stages.

    Raises:
        UsageError: see `stage_of_step`.
    """
    _check_stages(graph, options)
    check_training(graph, options)
    with without_collection():
        forward = run_passes(graph, of_stages(passes_of_training(options), (Stage.FORWARD, Stage.MEMORY)))
        return laid_out(forward, options.stages, prices_of(options))


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
    for name in options.given(lambda info: not info.with_stages):
        if getattr(options, name):
            raise UsageError(
                f"{name} is for a step that one rank runs whole, and not for stages={stages}: leave it out"
            )


def forward_graph(graph: Graph, options: Options, watch: Watch | None = None) -> Graph:
    """The forward pass alone."""
    instance("a model", graph, Graph, A_MODEL)
    if options.gradients:
        raise UsageError("gradients are of a loss, and this is inference: pass a loss, or leave gradients out")
    return run_passes(graph, passes_of_inference(options), watch=watch)


def check_training(graph: Graph, options: Options) -> None:
    """Check what is asked of a training step before anything is done.

    Raises:
        UsageError: there is no model, no such output, or no optimizer.
    """
    instance("a model", graph, Graph, A_MODEL)
    optimizer = options.optimizer
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "learning_rate")):
        raise UsageError(f"the optimizer must be one such as optim.Nesterov(0.1), and is {optimizer!r}")
    check_trained(options)
    passes.SelectOutputs(tuple(options.outputs or ()))(graph)


def weights_as_trained(graph: Graph, selection: Selection, narrow_weights: bool) -> Graph:
    """A model whose weights are those that a training step keeps, so that sessions can share them."""
    graph = passes.quantised_weights(passes.ChooseTrained(selection)(graph))
    return graph if narrow_weights else passes.master_weights(graph)


def lowered(graph: Graph, options: Options, prefetch: bool = True) -> Program:
    """The program of a step's graph."""
    return lower(
        graph,
        options.target,
        activations=options.activations,
        offload=options.offload,
        prefetch=prefetch and options.prefetch,
        prepack=options.prepack,
        tune=options.tune,
        accuracy=options.accuracy,
        workspace=options.workspace,
        links=options.links,
        passes=options.passes,
    )
