"""Notes on what a file has lost or does not tell, where nothing can be repaired: a person must export anew, or choose.

They name batch normalisation that is probably folded into convolutions (their weights have names that the exporter
makes, and the file has no BatchNormalization), tensors that the exporter may have computed from parameters, tensors
whose role only their name tells, weights that ops read as integers, buffers that the module changes in each step, and
an embedding with the numbers of the head's matrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from foreplan.base.units import listed
from foreplan.frontend.onnx.module.contents import Layout, layout_in
from foreplan.frontend.onnx.module.exporter import Exporter
from foreplan.frontend.onnx.roles import LEARNED, LEFT_OVER, Role
from foreplan.frontend.onnx.tensors import FLOATS, WHOLE, dtype_of
from foreplan.graph.value import Kind

if TYPE_CHECKING:
    import onnx

_TO_KEEP = (
    "to train with it, export the module in training mode, with torch.onnx.export(…, optimize=False), or with "
    "dynamo=False by training=TrainingMode.TRAINING, do_constant_folding=False"
)
_IN_INTEGERS = re.compile("QLinear.*|.*Integer.*|DynamicQuantize.+|MatMulNBits|QAttention|QGemm")
_MOST = 64  # tables and matrices that are compared


def notes_on(graph: onnx.GraphProto, roles: Mapping[str, Role], exporter: Exporter) -> list[str]:
    """What a person who trains the model should know of its file."""
    held = {tensor.name: tensor for tensor in graph.initializer}
    trained = {name for name in held if name in roles and roles[name].kind is Kind.PARAMETER}
    return [
        *_folded(graph, trained, exporter),
        *_left_over(held, roles),
        *_guessed(roles),
        *_integers(graph, held),
        *_changed(graph, held, exporter),
        *_untied(graph, held, trained, exporter.path),
    ]


def _folded(graph: onnx.GraphProto, trained: set[str], exporter: Exporter) -> list[str]:
    """A convolution's weight is the module's own, unless the exporter has computed another one."""
    if any(node.op_type == "BatchNormalization" for node in graph.node):
        return []
    convolutions = [node for node in graph.node if node.op_type in ("Conv", "ConvTranspose") and len(node.input) > 1]
    made = [node for node in convolutions if node.input[1] in trained and exporter.made(node.input[1])]
    if not made:
        return []
    return [
        f"the exporter has computed the weights of {len(made)} of {len(convolutions)} convolutions, such as "
        f"{made[0].input[1]!r}: batch normalisation is probably folded into them, and is not trained; {_TO_KEEP}"
    ]


def _changed(graph: onnx.GraphProto, held: Mapping[str, onnx.TensorProto], exporter: Exporter) -> list[str]:
    """Buffers to which the module gives another content in each step; those of batch normalisation are changed here."""
    statistics = {name for node in graph.node if node.op_type == "BatchNormalization" for name in node.input[3:5]}
    found = [name for name in dict.fromkeys(exporter.signature.changes.values()) if name in held]
    stays = [name for name in found if name not in statistics]
    if not stays:
        return []
    return [f"the module gives {listed(map(repr, stays), 3)} another content in each step of training: here it stays"]


def _left_over(held: Mapping[str, onnx.TensorProto], roles: Mapping[str, Role]) -> list[str]:
    """What the exporter computed from parameters, or from tables: the file does not tell which."""
    found = [name for name, tensor in held.items() if roles[name] == LEFT_OVER and math.prod(tensor.dims) > 1]
    learned = [name for name in held if roles[name] == LEARNED]
    notes = []
    if found:
        notes.append(
            f"the exporter has computed {listed(map(repr, found), 3)}, in no weight's place: not trained. If they come "
            "from parameters, export with optimize=False, or name them in train="
        )
    if learned:
        notes.append(
            f"the exporter has computed {listed(map(repr, learned), 3)}, filled as by training: trained. If they come "
            "from buffers, name them in freeze="
        )
    return notes


def _integers(graph: onnx.GraphProto, held: Mapping[str, onnx.TensorProto]) -> list[str]:
    """Weights that ops read as integers, and those in too few bits to be trained as they are rounded."""
    for node in graph.node:
        read = [held[name] for name in node.input if name in held and math.prod(held[name].dims) > 1]
        for tensor in read:
            told = ""
            if _IN_INTEGERS.fullmatch(node.op_type) and tensor.data_type not in FLOATS:
                told = f"are integers that {node.op_type} reads"
            elif node.op_type == "DequantizeLinear" and tensor.data_type not in {*FLOATS, *WHOLE}:
                told = f"are {dtype_of(tensor.data_type, tensor.name)}"
            if told:
                return [
                    f"weights such as {tensor.name!r} {told}, and no gradient reaches them; train the model before it "
                    "is quantised so, or in QDQ form with 8 bits"
                ]
    return []


def _guessed(roles: Mapping[str, Role]) -> list[str]:
    """Roles that only names tell."""
    notes = []
    for kind, told in (
        (Kind.PARAMETER, "they seem to be learned: trained. If they are not, name them in freeze="),
        (Kind.CONSTANT, "they seem to be constants: not trained. If they were learned, name them in train="),
    ):
        found = [name for name, role in roles.items() if role.guessed and role.kind is kind]
        if found:
            notes.append(f"neither use nor numbers tell the roles of {listed(map(repr, found), 3)}; by name {told}")
    return notes


def _untied(
    graph: onnx.GraphProto, held: Mapping[str, onnx.TensorProto], trained: set[str], path: Path | None
) -> list[str]:
    """Embeddings whose numbers stand in the file again, as the matrix of a product."""
    transposed = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Transpose"}
    tables, matrices = [], []
    for node in graph.node:
        if node.op_type == "Gather":
            tables.append(node.input[0])
        elif node.op_type in ("MatMul", "Gemm"):
            matrices += [transposed.get(name, name) for name in node.input[:2]]
    found = []
    for table in [name for name in dict.fromkeys(tables) if name in trained][:_MOST]:
        for matrix in [name for name in dict.fromkeys(matrices) if name in trained and name != table]:
            if layout_in(held[table], held[matrix], path) in (Layout.SAME, Layout.TRANSPOSED):
                found.append(
                    f"{table!r} and {matrix!r} hold the same numbers: if the model ties them, the file does not, and "
                    "each is trained by itself"
                )
    return found
