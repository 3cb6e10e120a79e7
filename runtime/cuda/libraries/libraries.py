"""Where NVIDIA's libraries are on this machine: their files, to be loaded by ctypes."""

from __future__ import annotations

import ctypes.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path


def library_files(name: str) -> Iterator[str]:
    """Files of a library such as `cublasLt`: those of wheels first, the newest of a folder before the others; then a
    CUDA toolkit's and an environment's; then what the system's loader finds.
    """
    for folder in filter(os.path.isabs, sys.path):  # never the current folder
        yield from _newest_first(Path(folder).glob(f"nvidia/*/lib/lib{name}.so.*[0-9]"))
    roots = (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), sys.prefix, "/usr/local/cuda")
    for root in filter(None, roots):
        yield from _newest_first(Path(root).glob(f"lib*/lib{name}.so.*[0-9]"))
    if found := ctypes.util.find_library(name):
        yield found


def _newest_first(files: Iterator[Path]) -> list[str]:
    def version(file: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", file.name.rpartition(".so.")[2])]

    return [str(file) for file in sorted(files, key=lambda file: (version(file), file.name), reverse=True)]
