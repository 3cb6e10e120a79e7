"""Networks as papers and courses have them, of PyTorch alone: what stands between layers more than layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.torch.outside.written import images, others, parameters, sequences  # noqa: F401 -- each fills NETWORKS
from tests.torch.outside.written.network import NETWORKS, Made


def from_written() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Each network."""
    for name, make in NETWORKS.items():
        yield f"written/{name}", make
