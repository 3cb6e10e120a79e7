"""A step as eager PyTorch runs it, beside its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreplan.base.errors import UsageError
from foreplan.compiler.compiled import Compiled
from foreplan.eager import Variant, as_pytorch
from foreplan.eager.at_hand import workspaces_on
from foreplan.passes import ChooseTrained, FuseAttention, of_mode
from foreplan.views.eager_comparison import Beside


def beside_pytorch(step: Compiled, variant: Mapping[str, Any]) -> Beside:
    """What `Compiled.as_pytorch` gives.

    Args:
        variant: the fields of `foreplan.eager.Variant` that are not as usual.
    """
    chosen, options = Variant(**variant), step.options
    if step.model is None:
        raise UsageError("a plan file does not hold the model, which PyTorch's step is counted from: give the model")
    if options.precision == "fp16":
        raise UsageError(
            "as PyTorch, the step of a graph is counted in float32 or bf16: say one of them, or give the module "
            "itself to fp.eager_memory"
        )
    if options.ranks > 1 and (chosen.parallel != "ddp" or options.shard != "none" or options.tensor > 1):
        raise UsageError(
            "as PyTorch, one process is counted, or one of several within DistributedDataParallel, whose weights "
            "are whole: say --as ddp (parallel='ddp'), or leave ranks out; the batch is that of one rank. FSDP2 is "
            "counted of a PyTorch module alone: --as fsdp2, or shard= of fp.eager_memory"
        )
    graph = of_mode(ChooseTrained(options.selection)(step.model), training=chosen.grad != "off")
    if chosen.attention != "eager":
        graph = FuseAttention(least=0)(graph)
    workspaces = workspaces_on(step.program.target, chosen)
    cuda = workspaces is not None
    eager = as_pytorch(
        graph, options.loss, options.optimizer, chosen, cuda, accumulate=step.accumulate,
        precision=options.precision, workspaces=workspaces,
    )  # fmt: skip
    return Beside(eager, step.program, step.plan)
