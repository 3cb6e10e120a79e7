"""What options say of several ranks, and what of it means nothing for a step."""

from __future__ import annotations

from foreplan.base.errors import UsageError
from foreplan.graph import Value
from foreplan.lower.program import PARAMETERS
from foreplan.options import USUAL, Options
from foreplan.options.shared_weights import SharedWeights
from foreplan.passes.ranks import Ranks, Storage
from foreplan.passes.stages import CutIntoStages


def ranks_of(options: Options) -> Ranks:
    """The ranks that run a step together, each on samples of its own."""
    return Ranks(max(1, options.ranks // options.stages), options.shard, options.tensor)


def check_trained(options: Options) -> None:
    """Check what options say of ranks that train.

    Raises:
        UsageError: an option is of a step with an optimizer, or of inference.
    """
    if options.optimizer is None and options.shard != "none":
        raise UsageError(
            f"shard={options.shard!r} is of what an optimizer updates, and this step has none: pass an optimizer, or "
            "leave shard out"
        )
    if options.share is not None:
        raise UsageError("share is for inference, and this step trains: leave share or the loss out")


def storage_of(options: Options) -> Storage:
    """How a forward pass has its weights.

    Raises:
        UsageError: an option is of training alone, or says something else than the step to share with.
    """
    shard = options.shard
    if shard in ("state", "gradients"):
        raise UsageError(
            f"shard={shard!r} is of what training keeps, and this is inference: leave it out, or take 'parameters', of "
            "which each rank then holds a part"
        )
    if options.batch_norm == "sync":
        raise UsageError(
            "batch_norm='sync' is of training, and this is inference, which takes the running statistics: leave it out"
        )
    if options.prepack and (shard == "parameters" or options.share is not None):
        raise UsageError(
            "prepack lays out weights once, and these lie in parts or as another step has them: leave prepack out"
        )
    if options.share is None:
        return Storage(ranks_of(options))
    lent: SharedWeights = options.share
    step = lent.program
    _check_share(options, lent)
    like = tuple(
        Value(slot.name, slot.operand.type, slot.kind, slot.init)
        for slot in step.stored
        if step.values[slot.operand.value].region == PARAMETERS
    )
    cut = [shard.ranks for stage in lent.held for shard in stage.values() if shard is not None]
    return Storage(Ranks(step.of_stage, tensor=max([step.tensor, *cut])), like, step.model, lent.held)


def forward_stage_of(options: Options) -> CutIntoStages | None:
    """What makes one stage of a forward pass: where the step that it shares weights with is one; None: it is whole."""
    lent: SharedWeights | None = options.share
    if lent is None or not lent.program.is_stage:
        return None
    return CutIntoStages(lent.held, lent.program.stage, lent.program.of_stage)


def _check_share(options: Options, lent: SharedWeights) -> None:
    """Check that a forward pass can share with a step."""
    step = lent.program
    if step.is_stage and not lent.held:
        raise UsageError(
            "share: the step is one stage of several: give its session, which knows what the others have "
            "(session = step.bind(); compile(…, share=session))"
        )
    if any(slot.operand.blocks is not None for slot in step.stored):
        raise UsageError("share: the step has its weights in blocks of its own: compile it without prepack")
    for name in ("ranks", "shard", "tensor"):
        if getattr(options, name) != getattr(USUAL, name):
            raise UsageError(f"{name} is as in the step to share with: leave {name}={getattr(options, name)!r} out")
