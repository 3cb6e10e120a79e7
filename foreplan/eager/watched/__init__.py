"""A training step of a PyTorch module at hand: PyTorch itself runs it, on tensors without bytes, and its storages are
followed. The modules of this package import torch; the package does not.

follow        the storages that are alive, by the ops that make and drop them
known         values of tensors that do not depend on weights, for code that asks for them
kernels       where PyTorch's description of a kernel differs from it
paths         which part of the module runs
imagined      a module's tensors without bytes, on a processor or on a card that is not here
autocast      of that card
attention     what that card takes for attention
convolutions  what its convolutions take for their own duration
ranks         one rank of several, within FSDP2
recipe        losses and optimizers that foreplan names, in PyTorch
loop          the training loop, phase by phase
"""
