"""Modules of other projects, drawn from all that these have, beside PyTorch: `python -m tests.torch.outside`."""
