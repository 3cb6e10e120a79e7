"""Which merged weights of TorchScript's exporter belong to copied layers, and are not tied.

TorchScript's exporter names a node by its module (`/encoder/layers.1/linear1/MatMul`). It merges equal initializers and
leaves an Identity with each lost name, also with names of its own for the matrices that it has transposed. Such a
matrix may be a copy, or one that the module ties. It is a copy if the module has lost a named weight between the same
two layers, or if it is a vector of zeros or ones; `merged_weights` then gives it content of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from foreplan.frontend.onnx.module.contents import is_zeros_or_ones
from foreplan.frontend.onnx.module.exporter import Exporter

if TYPE_CHECKING:
    import onnx

_Paths = tuple[tuple[str, ...], tuple[str, ...]]


def identities_of_copies(
    nodes: Sequence[onnx.NodeProto],
    lost: Mapping[int, tuple[str, str]],
    held: Mapping[str, onnx.TensorProto],
    exporter: Exporter,
) -> set[int]:
    """The Identities of made-up names whose tensors are copies, and not tied.

    They are read in a part of the module where a tensor with a name in the module is lost too, against one of the part
    that the kept tensor is read in. Zeros and ones prove nothing: they are equal in any two fresh modules. So a vector
    of them is a copy wherever it is read in another part.

    Args:
        nodes: of the file.
        lost: by the index of an Identity: the name that is kept, and the one that is lost.
        held: the file's tensors of floats.
        exporter: what it tells.
    """
    readers: dict[str, set[tuple[str, ...]]] = {}
    for node in nodes:
        for name in node.input if node.op_type != "Identity" else ():
            readers.setdefault(name, set()).add(tuple(node.name.split("/")[:-1]))

    def paths(index: int) -> _Paths | None:
        kept, copy = (readers.get(name, set()) for name in lost[index])
        return _without_common_end(min(kept), min(copy)) if kept and len(copy) == 1 and not kept & copy else None

    named = {index for index, names in lost.items() if all(map(exporter.names_module, names))}
    proofs = {paths(i) for i in named if not is_zeros_or_ones(held[lost[i][0]], exporter.path)}
    found = {index: paths(index) for index in lost.keys() - named}
    return {i for i, at in found.items() if at is not None and (at in proofs or _is_fresh(held[lost[i][0]], exporter))}


def _is_fresh(tensor: onnx.TensorProto, exporter: Exporter) -> bool:
    """Whether a tensor is a vector of zeros or ones."""
    return sum(extent != 1 for extent in tensor.dims) == 1 and is_zeros_or_ones(tensor, exporter.path)


def _without_common_end(one: tuple[str, ...], other: tuple[str, ...]) -> _Paths:
    """Two paths without the steps at their ends that are the same."""
    while one and other and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    return one, other
