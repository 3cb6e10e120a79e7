"""A training step as eager PyTorch runs it: what it keeps, when, and how many bytes that is.

storage      tensors without bytes, and the count of their storages
autocast     the types that ops take within `torch.autocast`
autograd     what forward saves, and the engine that walks backward
rules/       PyTorch's ops: what each makes, saves, and what its derivative makes
expressions  a `map` as PyTorch's ops
modules      a model's graph as modules: nodes that PyTorch has one op for
forward      one forward pass, node by node
attached     the loss
optimizers   what optimizers keep, and what their steps hold for a moment
variant      what may differ from one user to the next
workspace    what a convolution takes for its own duration, and who says it
step         three steps in a row, phase by phase
ddp          what DistributedDataParallel keeps beside a step
result       the same for people and programs
allocator    the caching allocator of cards, replayed
at_hand      the step of a PyTorch module at hand
watched/     such a step, run by PyTorch itself
"""

from foreplan.eager.result import Eager, Phase
from foreplan.eager.step import as_pytorch
from foreplan.eager.variant import Variant, variant_options
from foreplan.eager.workspace import Workspaces

__all__ = ["Eager", "Phase", "Variant", "Workspaces", "as_pytorch", "variant_options"]
