"""The memory of a training step of a PyTorch module at hand, from PyTorch itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from foreplan.base.arguments import choice, flag, instance, mapping, names_in, whole
from foreplan.base.errors import TargetError, UsageError
from foreplan.eager.result import Eager
from foreplan.eager.variant import Variant
from foreplan.eager.workspace import Workspaces

PRECISIONS = ("float32", "bf16", "fp16")
_OF_GRAPHS = ("gradients", "results", "relu", "checkpoint", "gelu")


def eager_memory(
    module: Any,
    *example: Any,
    kwargs: Mapping[str, Any] | None = None,
    loss: Any = None,
    loss_inputs: Any = None,
    optimizer: Any = None,
    precision: str = "float32",
    accumulate: int = 1,
    target: str = "cpu",
    real: bool = False,
    ranks: int = 1,
    shard: Iterable[str] = (),
    variant: Mapping[str, Any] | None = None,
) -> Eager:
    """The bytes of live tensors in a training step of a PyTorch module, phase by phase; print it.

    PyTorch runs the module's own forward pass, its backward pass and the optimizer, three steps in a row, on tensors
    without bytes, which the module has until this returns. No weight is read or changed, and nothing is computed but
    small tensors that the code asks for, such as masks. Checkpoints, hooks and shared weights count as written.

    Args:
        module: as it is trained; frozen parameters stay so.
        example, kwargs: of one call, as tensors of any device; those on `meta` have no values that code could ask for.
        loss: a function from the module's output and `loss_inputs` to a scalar, or one that foreplan names, such as
            "cross_entropy", of the first output. None: the output has an attribute or key `loss`.
        loss_inputs: further inputs of the loss; they are made up for a loss that foreplan names.
        optimizer: a function from parameters to an optimizer, such as `torch.optim.AdamW`, or one of `foreplan.optim`.
            None: gradients are computed, and nothing is updated.
        precision: "float32"; or "bf16" or "fp16": forward pass and loss run within `torch.autocast`, with fp16 a
            `GradScaler` scales the loss.
        accumulate: calls of the module in a step, each with an example of its own; the loss is divided by it.
        target: "cpu", or a card, such as "cuda:h100".
        real: run the module on real tensors, on the CPU: for code that asks for values which depend on weights. It
            takes the memory and the time of the steps, and draws random numbers; weights are trained.
        ranks: processes that train together, each with an example of its own. Without `shard`, one of them within
            `DistributedDataParallel` is counted.
        shard: parts of the module that FSDP2 gathers one by one (`fully_shard`), by name or pattern, such as
            `["model.layers.*"]`; the rest is one part more. With bf16 gathered weights are narrow, gradients are summed
            in float32, without autocast.
        variant: the rest of what may differ from one user to the next, such as `{"zero": "keep"}`: see
            `foreplan.eager.Variant`. A module is run as it is written: `relu`, `checkpoint`, `gelu`, `gradients` and
            `results` are not for it.

    Raises:
        UsageError: an option that is none or not for a module, PyTorch is not installed, or there is no loss.
        UnsupportedError: code asks for a value that depends on weights, or runs an op of which PyTorch does not know
            what it gives; names the line.
    """
    try:
        from foreplan.eager.watched.loop import Recipe, run
    except ImportError:
        raise UsageError("a module at hand is run by PyTorch: install it, for example by foreplan[torch]") from None
    shard, real = tuple(names_in("shard", shard)), flag("real", real)
    ranks, accumulate = whole("ranks", ranks, 1), whole("accumulate", accumulate, 1)
    kwargs = mapping("kwargs", {} if kwargs is None else kwargs, "{'mask': mask}")
    variant = mapping("variant", {} if variant is None else variant, "{'zero': 'keep'}")
    target = instance("target", target, str, "give a name such as cpu or cuda:h100")
    chosen = Variant(**({"parallel": "ddp" if ranks > 1 and not shard else "none"} | dict(variant)))
    if shard and (ranks == 1 or real or precision == "fp16"):
        raise UsageError("shard: say among how many ranks, 2 or more, in float32 or bf16, and without real")
    others = [name for name in _OF_GRAPHS if getattr(chosen, name) != getattr(Variant(), name)]
    if others:
        raise UsageError(
            f"{others[0]}: a module at hand is run as it is written: write it so, and leave the option out"
        )
    if chosen.attention == "eager":
        raise UsageError(
            "attention=eager: a module at hand is run as it is written: build it so, in transformers with "
            'attn_implementation="eager"'
        )
    workspaces = workspaces_on(target, chosen)
    cuda = workspaces is not None
    if real and cuda:
        raise UsageError("real: real tensors are on the CPU; leave it out, or say device='cpu'")
    if chosen.attention != "auto" and not cuda:
        raise UsageError(
            f"attention={chosen.attention}: on a CPU PyTorch has one kernel; say device='cuda', or leave it out"
        )
    choice("precision", precision, PRECISIONS)
    inputs = tuple(loss_inputs) if isinstance(loss_inputs, tuple | list) else (loss_inputs,)
    recipe = Recipe(
        example, kwargs, loss, None if loss_inputs is None else inputs, optimizer, precision, accumulate, chosen,
        workspaces, real, ranks, shard,
    )  # fmt: skip
    return run(module, recipe)


def workspaces_on(target: str, variant: Variant) -> Workspaces | None:
    """What convolutions take on the card that a step runs on, and who says it; None: it runs on a processor."""
    if not variant.on(target):
        return None
    found = Workspaces(variant.limit)
    if variant.limit == 0:
        return found
    from foreplan.lower.targets import engine_info

    engine = engine_info(target)
    if not engine.on_card:
        found.missing = f"the target {target} names no card to ask it for, as cuda:h100 does"
        return found
    try:
        found.library = engine.module("workspaces").asked(target, variant.tf32 == "on")
    except TargetError as error:
        found.missing = str(error)
    return found
