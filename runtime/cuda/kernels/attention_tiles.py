"""How the blocks of attention's kernels are made up: their tiles, threads and shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foreplan.base.units import align_up
from foreplan.graph.types import FLOAT32
from foreplan.ops.attention.blocks import Extents
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.kernel import Refused

FORWARD, QUERIES, KEYS = "attention", "attention_queries", "attention_keys"
RESERVED_BYTES = 1024  # of shared memory, for each block


@dataclass(frozen=True)
class Tile:
    """What a block computes together, as in cuda/attention.cuh.

    Attributes:
        rows, columns: of its own side, and of the other side at a time.
        threads: of a block.
        across: threads side by side; 0: its products run on tensor cores.
        resident: blocks that a multiprocessor should have registers for.
        widest: the longest heads for which these suffice.
        query_tiles: buffers for queries in `attention_keys`.
    """

    rows: int
    columns: int
    threads: int
    across: int
    resident: int
    widest: int
    query_tiles: int = 1

    def nbytes(self, kernel: str, e: Extents) -> int:
        """Shared memory of a block."""
        depth, values = _pitch(e.depth), _pitch(e.value_depth)
        floats = self.rows * (self.columns + self.across) if self.across else 0
        if kernel == FORWARD:
            floats += self.rows * depth + self.columns * (depth + values)
        elif kernel == QUERIES:
            floats += (self.rows + self.columns) * (depth + values)
        else:
            floats += self.rows * (depth + values) + self.columns * (values + self.query_tiles * (depth + 2))
        return floats * FLOAT32.itemsize


def _pitch(width: int) -> int:
    """Floats from one row of a tile to the next."""
    return max(8, align_up(width, 8)) + 4


# Chosen on an H200 among 4 to 10 for each: batches of GPT-2, BERT, a masked one, and 16 heads of 128 that share 4.
# The first that fits is taken, unless half of its rows or more would be empty and a later one fits, too.
THREADS: Mapping[str, tuple[Tile, ...]] = {
    FORWARD: (
        Tile(64, 64, 128, 16, 3, 64),
        Tile(128, 64, 256, 16, 1, 128),
        Tile(64, 64, 128, 16, 2, 128),
        Tile(32, 32, 128, 16, 2, 256),
        Tile(16, 16, 128, 16, 1, 512),
        Tile(8, 16, 64, 16, 1, 512),
    ),
    QUERIES: (
        Tile(64, 64, 128, 16, 2, 64),
        Tile(64, 64, 256, 16, 1, 128),
        Tile(32, 64, 128, 16, 2, 128),
        Tile(32, 32, 128, 16, 2, 256),
        Tile(16, 16, 128, 16, 1, 512),
        Tile(8, 16, 64, 16, 1, 512),
    ),
    KEYS: (
        Tile(64, 64, 128, 16, 2, 64, 2),
        Tile(32, 64, 128, 16, 2, 128),
        Tile(32, 32, 256, 16, 1, 256),
        Tile(16, 16, 128, 16, 1, 512),
        Tile(8, 16, 64, 16, 1, 512),
    ),
}
WARPS: Mapping[str, tuple[Tile, ...]] = {
    FORWARD: (
        Tile(128, 64, 128, 0, 2, 64),
        Tile(64, 64, 128, 0, 3, 64),
        Tile(128, 32, 128, 0, 2, 128),
        Tile(64, 32, 128, 0, 2, 128),
        Tile(64, 32, 128, 0, 1, 256),
        Tile(16, 32, 32, 0, 4, 256),
    ),
    QUERIES: (
        Tile(128, 64, 128, 0, 2, 64),
        Tile(64, 64, 128, 0, 3, 64),
        Tile(128, 64, 256, 0, 1, 128),
        Tile(64, 32, 128, 0, 2, 128),
        Tile(64, 16, 128, 0, 1, 256),
        Tile(16, 16, 32, 0, 4, 256),
    ),
    KEYS: (Tile(64, 32, 128, 0, 3, 64, 2), Tile(64, 32, 128, 0, 1, 128), Tile(16, 16, 32, 0, 4, 128)),
}


def tile_for(kernel: str, e: Extents, device: Device, tensor_cores: bool = False) -> tuple[Tile, int]:
    """The tile of a kernel, and the blocks that a multiprocessor can run at a time.

    Raises:
        Refused: rows are too long, or elements too wide.
    """
    if e.dtype.wide != FLOAT32:
        raise Refused(f"attention in {e.dtype}")
    rows = e.keys if kernel == KEYS else e.queries
    found = None
    for tile in (WARPS if tensor_cores else THREADS)[kernel]:
        nbytes = tile.nbytes(kernel, e)
        resident = min(tile.resident, device.shared_bytes_per_multiprocessor // (nbytes + RESERVED_BYTES))
        if max(e.depth, e.value_depth) <= tile.widest and resident and nbytes <= device.shared_bytes_per_block:
            found = tile, resident
            if 2 * rows > tile.rows:
                break
    if found is None:
        raise Refused(f"heads of {e.depth} and {e.value_depth}")
    return found
