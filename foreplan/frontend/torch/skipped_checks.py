"""What PyTorch's own layers ask of numbers only to check them, or to go faster, is not asked while a module is
exported: there are no numbers then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from foreplan.frontend.torch.patches import patched


@contextlib.contextmanager
def without_number_checks() -> Iterator[None]:
    """While the body runs, distributions do not validate what they are given, unless asked to by name; a mask of
    transformers is read as it is, without a look at whether it is causal; and variances are not looked at.
    """
    import torch
    from torch.distributions import Distribution
    from torch.nn import functional
    from torch.nn.modules import transformer

    gaussian = functional.gaussian_nll_loss

    def unchecked(*args: Any, **kwargs: Any) -> Any:
        with patched(torch, "any", lambda *_: False):
            return gaussian(*args, **kwargs)

    with (
        patched(Distribution, "_validate_args", False),
        patched(transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True),
        patched(functional, "gaussian_nll_loss", unchecked),
    ):
        yield
