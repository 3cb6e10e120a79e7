"""What a step is compiled with: each option said once, and how functions and checks take it."""

from foreplan.options.options import PRECISIONS, USUAL, Options

__all__ = ["PRECISIONS", "USUAL", "Options"]
