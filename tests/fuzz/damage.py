"""Damage to ONNX models: bytes changed, and structure that no exporter writes."""

from __future__ import annotations

import random
from collections.abc import Callable

import onnx
from onnx import AttributeProto, TensorProto, helper

EXTREME = (
    -(2**63),
    -(2**31),
    -(10**9),
    -65,
    -3,
    -2,
    -1,
    0,
    1,
    2,
    3,
    5,
    7,
    63,
    64,
    65,
    1000,
    2**20,
    2**31,
    10**12,
    2**62,
)
EXTREME += (2**63 - 1,)
FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 1e38, -1.0, 0.5, 2.0, 1e9)
OPS = tuple(sorted({schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}))
ATTRIBUTES = tuple(sorted({name for op in OPS for name in onnx.defs.get_schema(op).attributes}))
TEXTS = (
    "",
    "constant",
    "reflect",
    "linear",
    "SAME_UPPER",
    "bidirectional",
    "ij,jk->ik",
    "...ii->...",
    "\0",
    "é" * 40,
    "sum",
)
LOCATIONS = (
    "held.bin",
    "../outside.bin",
    "/etc/passwd",
    "link",
    "",
    "\0",
    "missing",
    ".",
    "held.bin/x",
    "a/../held.bin",
)
DEEPEST = 25  # graphs in one another; each is three messages, and protobuf reads a hundred
NUMBERS = ("0", "4", "-1", "9" * 30, "9" * 5000, "x", "", "1e3", "18446744073709551616")


def bytes_changed(rng: random.Random, data: bytes) -> bytes:
    """A few bytes written, cut out, doubled or flipped."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(made) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(made):
            made[at] = rng.randrange(256)
        elif kind == 1 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del made[at : at + rng.choice((1, 2, 7, 40))]
        elif kind == 3:
            piece = made[at : at + rng.choice((1, 5, 60))]
            made[at:at] = piece
        else:
            made[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 2, 9))))
    return bytes(made)


def structure_changed(rng: random.Random, model: onnx.ModelProto) -> None:
    """One to four changes, in place."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(CHANGES)(rng, model)


def _node(rng: random.Random, model: onnx.ModelProto) -> onnx.NodeProto:
    graph = model.graph
    if not graph.node:
        graph.node.append(helper.make_node("Neg", ["x"], ["y"]))
    return rng.choice(graph.node)


def _name(rng: random.Random, model: onnx.ModelProto) -> str:
    graph = model.graph
    names = [v.name for v in (*graph.input, *graph.output, *graph.initializer)] + [
        o for n in graph.node for o in n.output
    ]
    return rng.choice([*names, "", "nowhere"])


def _tensor(rng: random.Random, model: onnx.ModelProto) -> TensorProto:
    held = [*model.graph.initializer, *(a.t for n in model.graph.node for a in n.attribute if a.HasField("t"))]
    return rng.choice(held) if held else model.graph.initializer.add(name="added", data_type=1, dims=[2])


def _attribute(rng: random.Random, name: str) -> AttributeProto:
    made = AttributeProto(name=name)
    kind = rng.randrange(10)
    if kind < 3:
        made.type, made.i = AttributeProto.INT, rng.choice(EXTREME)
    elif kind < 6:
        made.type = AttributeProto.INTS
        made.ints.extend(rng.choice(EXTREME) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4, 8, 66))))
    elif kind == 6:
        made.type, made.f = AttributeProto.FLOAT, rng.choice(FLOATS)
    elif kind == 7:
        made.type, made.s = AttributeProto.STRING, rng.choice(TEXTS).encode()
    elif kind == 8:
        made.type, made.floats[:] = AttributeProto.FLOATS, [rng.choice(FLOATS) for _ in range(rng.randrange(5))]
    else:
        made.type, made.strings[:] = AttributeProto.STRINGS, [text.encode() for text in rng.sample(TEXTS, 2)]
    if rng.random() < 0.1:
        made.type = rng.randrange(15)
    return made


def _change_attribute(rng: random.Random, model: onnx.ModelProto) -> None:
    node = _node(rng, model)
    own = list(onnx.defs.get_schema(node.op_type).attributes) if node.op_type in OPS else []
    there = [attribute.name for attribute in node.attribute]
    name = rng.choice([*there, *there, *own, rng.choice(ATTRIBUTES)])
    left = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(left)
    if rng.random() < 0.85:
        node.attribute.append(_attribute(rng, name))


def _nudge_attribute(rng: random.Random, model: onnx.ModelProto) -> None:
    held = [a for n in model.graph.node for a in n.attribute if a.type in (AttributeProto.INT, AttributeProto.INTS)]
    if held and (attribute := rng.choice(held)).type == AttributeProto.INT:
        attribute.i = rng.choice((attribute.i ^ 1, *EXTREME))
    elif held and attribute.ints:
        attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(EXTREME)


def _change_input(rng: random.Random, model: onnx.ModelProto) -> None:
    node, kind = _node(rng, model), rng.randrange(4)
    if kind == 0 or not node.input:
        node.input.append(_name(rng, model))
    elif kind == 1:
        node.input.pop(rng.randrange(len(node.input)))
    else:
        node.input[rng.randrange(len(node.input))] = _name(rng, model)


def _change_output(rng: random.Random, model: onnx.ModelProto) -> None:
    node = _node(rng, model)
    if node.output and rng.random() < 0.5:
        node.output[rng.randrange(len(node.output))] = _name(rng, model)
    else:
        node.output.append(rng.choice(("more", "", _name(rng, model))))
        if rng.random() < 0.5:
            model.graph.output.append(onnx.ValueInfoProto(name=node.output[-1]))


def _change_op(rng: random.Random, model: onnx.ModelProto) -> None:
    node = _node(rng, model)
    node.op_type = rng.choice((*OPS, *OPS, "Nothing", ""))
    if rng.random() < 0.1:
        node.domain = rng.choice(("ai.onnx", "ai.onnx.ml", "com.microsoft", "own"))


def _change_opset(rng: random.Random, model: onnx.ModelProto) -> None:
    del model.opset_import[:]
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        model.opset_import.append(helper.make_opsetid(rng.choice(("", "", "ai.onnx", "own")), rng.randint(-1, 30)))


def _change_type(rng: random.Random, model: onnx.ModelProto) -> None:
    infos = [*model.graph.input, *model.graph.output]
    if not infos:
        return
    tensor = rng.choice(infos).type.tensor_type
    if rng.random() < 0.3:
        tensor.elem_type = rng.choice((*range(27), 99))
        return
    dims = list(tensor.shape.dim)
    kind = rng.randrange(4)
    if kind == 0:
        tensor.shape.dim.add(dim_value=rng.choice(EXTREME))
    elif kind == 1 and dims:
        tensor.shape.dim.pop()
    elif kind == 2 and rng.random() < 0.3:
        for _ in range(rng.choice((8, 31, 33, 64, 65, 100))):
            tensor.shape.dim.add(dim_value=1)
    elif dims:
        rng.choice(dims).dim_value = rng.choice(EXTREME)


def _change_tensor(rng: random.Random, model: onnx.ModelProto) -> None:
    tensor, kind = _tensor(rng, model), rng.randrange(7)
    if kind == 0:
        tensor.dims.append(rng.choice(EXTREME))
    elif kind == 1 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(EXTREME)
    elif kind == 2:
        tensor.data_type = rng.choice((*range(27), 99))
    elif kind == 3:
        tensor.raw_data = tensor.raw_data[: rng.randrange(9)] + bytes(rng.randrange(9))
    elif kind == 4:
        tensor.int64_data.extend(rng.choice(EXTREME) for _ in range(rng.randrange(4)))
    elif kind == 5:
        tensor.dims.extend([1] * rng.choice((1, 8, 33, 64, 65)))
    else:
        _move_out(rng, tensor)


def _move_out(rng: random.Random, tensor: TensorProto) -> None:
    """Bytes in another file, which may be anywhere."""
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=rng.choice(LOCATIONS))
    for key in ("offset", "length"):
        if rng.random() < 0.4:
            tensor.external_data.add(key=key, value=rng.choice(NUMBERS))
    if rng.random() < 0.7:
        tensor.ClearField("raw_data")


def _change_numbers(rng: random.Random, model: onnx.ModelProto) -> None:
    """Integers, which are shapes, axes and places, or floats, such as scales."""
    held = [t for t in model.graph.initializer if t.data_type in (1, 6, 7) and t.raw_data]
    if not held:
        return
    import struct

    tensor = rng.choice(held)
    code, width = {1: ("<f", 4), 6: ("<i", 4), 7: ("<q", 8)}[tensor.data_type]
    numbers = FLOATS if tensor.data_type == 1 else [n for n in EXTREME if -(256**width) // 2 <= n < 256**width // 2]
    at = width * rng.randrange(max(1, len(tensor.raw_data) // width))
    tensor.raw_data = tensor.raw_data[:at] + struct.pack(code, rng.choice(numbers)) + tensor.raw_data[at + width :]


def _make_input(rng: random.Random, model: onnx.ModelProto) -> None:
    """A constant that the user gives, so that it is not known at import; or an input that is a constant."""
    graph = model.graph
    if graph.initializer and rng.random() < 0.7:
        tensor = graph.initializer.pop(rng.randrange(len(graph.initializer)))
        graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    elif graph.input:
        info = rng.choice(graph.input)
        dims = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        graph.initializer.add(name=info.name, data_type=info.type.tensor_type.elem_type, dims=dims)


def _depth(node: onnx.NodeProto) -> int:
    """How many graphs deep a node is."""
    return max((1 + max(map(_depth, a.g.node), default=0) for a in node.attribute if a.HasField("g")), default=0)


def _nest(rng: random.Random, model: onnx.ModelProto) -> None:
    """A node in a branch, a loop or a scan, perhaps many deep."""
    graph = model.graph
    if not graph.node:
        return
    node = graph.node.pop(rng.randrange(len(graph.node)))
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    for depth in range(min(rng.choice((1, 1, 2, 5, DEEPEST)), DEEPEST - _depth(node))):
        kind = rng.choice(("If", "Loop", "Scan"))
        flag, count = f"flag{depth}", f"count{depth}"
        body = helper.make_graph([node], "body", [], outputs)
        if kind == "If":
            graph.initializer.append(helper.make_tensor(flag, TensorProto.BOOL, [], [1]))
            other = helper.make_graph([], "other", [], outputs)
            node = helper.make_node("If", [flag], [o.name for o in outputs], then_branch=body, else_branch=other)
        elif kind == "Loop":
            body.input.extend([onnx.ValueInfoProto(name=f"i{depth}"), onnx.ValueInfoProto(name=f"go{depth}")])
            body.output.insert(0, onnx.ValueInfoProto(name=f"go{depth}"))
            graph.initializer.append(
                helper.make_tensor(count, TensorProto.INT64, [], [rng.choice((0, 1, 2, 3, 10**12))])
            )
            node = helper.make_node("Loop", [count, ""], [o.name for o in outputs], body=body)
        else:
            body.input.append(onnx.ValueInfoProto(name=f"part{depth}"))
            given = [_name(rng, model) for _ in range(rng.choice((1, 1, 2)))]
            number = rng.choice((1, 1, 0, 2, -1))
            node = helper.make_node("Scan", given, [o.name for o in outputs], body=body, num_scan_inputs=number)
    graph.node.append(node)


def _make_function(rng: random.Random, model: onnx.ModelProto) -> None:
    """A node as a function of the model's own, which may call itself."""
    node = _node(rng, model)
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inputs = list(dict.fromkeys(name for name in node.input if name))
    body = [inner]
    if rng.random() < 0.3:
        body.append(helper.make_node("Own", inputs, ["again"], domain="own"))
    if rng.random() < 0.2 and inner.attribute:
        inner.attribute[0].ref_attr_name = rng.choice(("axis", inner.attribute[0].name))
    opsets = [helper.make_opsetid("", rng.choice((7, 11, 13, 18, 21))), helper.make_opsetid("own", 1)]
    model.functions.append(helper.make_function("own", "Own", inputs, [o for o in node.output if o], body, opsets))
    call = helper.make_node("Own", inputs, [o for o in node.output if o], domain="own")
    node.CopyFrom(call)
    model.opset_import.append(helper.make_opsetid("own", 1))


def _change_outputs(rng: random.Random, model: onnx.ModelProto) -> None:
    kind = rng.randrange(3)
    if kind == 0 and model.graph.output:
        model.graph.output.pop()
    elif kind == 1:
        model.graph.output.append(onnx.ValueInfoProto(name=_name(rng, model)))
    elif model.graph.output:
        model.graph.output[0].type.sequence_type.elem_type.tensor_type.elem_type = 1


def _sparse(rng: random.Random, model: onnx.ModelProto) -> None:
    values = helper.make_tensor("sparse", 1, [1], [1.0])
    places = helper.make_tensor("places", 7, [1], [rng.choice(EXTREME)])
    made = helper.make_sparse_tensor(values, places, [rng.choice(EXTREME) for _ in range(2)])
    if rng.random() < 0.5:
        model.graph.sparse_initializer.append(made)
    else:
        model.graph.node.append(helper.make_node("Constant", [], ["sparse"], sparse_value=made))


CHANGES: tuple[Callable[[random.Random, onnx.ModelProto], None], ...] = (
    *(_change_attribute, _change_attribute, _nudge_attribute, _nudge_attribute, _change_input, _change_input),
    *(
        _change_output,
        _change_op,
        _change_op,
        _change_opset,
        _change_type,
        _change_type,
        _change_tensor,
        _change_tensor,
    ),
    *(_change_numbers, _change_numbers, _make_input, _nest, _make_function, _change_outputs, _sparse),
)
