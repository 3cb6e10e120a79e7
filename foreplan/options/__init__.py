"""What a step is compiled with: each option said once, and how functions and checks take it."""

from foreplan.options.options import USUAL, Options
from foreplan.options.step_options import PRECISIONS

__all__ = ["PRECISIONS", "USUAL", "Options"]
