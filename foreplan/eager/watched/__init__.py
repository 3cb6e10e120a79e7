"""A training step of a PyTorch module at hand: PyTorch itself runs it, on tensors without bytes, and its storages are
followed. torch is imported here, and when a function is called.

follow      the storages that are alive, by the ops that make and drop them
kernels     where PyTorch's description of a kernel differs from it
known       values of tensors that do not depend on weights, for code that asks for them
imagined    a module's tensors without bytes, on a processor or on a card that is not here
paths       which part of the module runs
autocast    of a card that is not here
attention   what a card takes for attention
recipe      losses and optimizers that foreplan names, in PyTorch
loop        the training loop, phase by phase
"""
