"""foreplan: compile a whole training step, look at its memory plan, then run it."""

__version__ = "0.1.0"
