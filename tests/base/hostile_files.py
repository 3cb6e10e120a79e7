"""Files that make much of few bytes: for each format, writers of a hostile file of about some size."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

Writer = Callable[[Path, int], None]
WRITERS: dict[str, dict[str, Writer]] = {}


def of(format: str) -> Callable[[Writer], Writer]:
    """A writer of hostile files of a format: it takes a path and about how many bytes."""

    def register(writer: Writer) -> Writer:
        WRITERS.setdefault(format, {})[writer.__name__] = writer
        return writer

    return register


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def snapshot_of(trace: bytes, segments: bytes = b"]") -> bytes:
    return b"\x80\x04}" + text("device_traces") + trace + b"s" + text("segments") + segments + b"s."


EVENT = pickle.dumps({"action": "alloc", "addr": 1, "size": 1, "frames": []}, protocol=2)[2:-1]


@of("snapshot")
def empty_containers(path: Path, size: int) -> None:
    path.write_bytes(b"\x80\x02]" + b"(" + b"}" * size + b"e.")


@of("snapshot")
def one_event_many_times(path: Path, size: int) -> None:
    path.write_bytes(snapshot_of(b"](](" + EVENT + b"q\xff" + b"h\xff" * (size // 2) + b"ee"))


@of("snapshot")
def one_trace_for_many_devices(path: Path, size: int) -> None:
    event = b"(" + EVENT * (size // 4 // len(EVENT)) + b"e"
    path.write_bytes(snapshot_of(b"](]" + event + b"q\xff" + b"h\xff" * (size // 4) + b"e"))


@of("snapshot")
def one_long_stack_for_all(path: Path, size: int) -> None:
    frame = pickle.dumps({"filename": "a.cpp", "name": "f", "line": 1}, protocol=2)[2:-1]
    stack = b"](" + frame + b"q\xfe" + b"h\xfe" * (size // 4) + b"eq\xfd"
    head = b"}(" + text("action") + text("alloc") + text("addr") + b"K\x01" + text("size") + b"K\x01" + text("frames")
    first = head + stack + b"u"
    more = (head + b"h\xfdu") * (size // 2 // len(head))
    path.write_bytes(snapshot_of(b"](](" + first + more + b"ee"))


@of("snapshot")
def one_long_name_in_many_stacks(path: Path, size: int) -> None:
    head = b"}(" + text("action") + text("alloc") + text("addr") + b"K\x01" + text("size") + b"K\x01" + text("frames")
    frame = b"}(" + text("filename") + b"h\xfe" + text("name") + b"h\xfe" + text("line") + b"K\x01u"
    events = (head + b"](" + frame + b"eu") * (size // 2 // (len(head) + len(frame)))
    long = b"}" + text("x") + text("/" * (size // 2)) + b"q\xfes"
    path.write_bytes(b"\x80\x04" + long + snapshot_of(b"](](" + events + b"ee")[3:])


@of("snapshot")
def keys_that_collide(path: Path, size: int) -> None:
    pairs = b"".join(
        b"\x8a\x09" + (7 + k % 1000 * ((1 << 61) - 1)).to_bytes(9, "little", signed=True) + b"N"
        for k in range(size // 12)
    )
    path.write_bytes(b"\x80\x02}(" + pairs + b"u.")


@of("snapshot")
def nested_tuples_as_a_key(path: Path, size: int) -> None:
    path.write_bytes(b"\x80\x02}K\x01" + b"q\x01h\x01\x86" * (size // 5) + b"K\x01s.")


@of("snapshot")
def nested_tuples_as_an_action(path: Path, size: int) -> None:
    nested = b"K\x01" + b"q\x01h\x01\x86" * (size // 16)
    path.write_bytes(snapshot_of(b"](](}" + text("action") + nested + b"s" + text("size") + b"K\x01see"))


@of("snapshot")
def a_large_memo(path: Path, size: int) -> None:
    path.write_bytes(b"\x80\x02}" + b"".join(b"r" + struct.pack("<I", 2**31 - i) for i in range(size // 5)) + b".")


@of("snapshot")
def imports_behind_much(path: Path, size: int) -> None:
    path.write_bytes(b"\x80\x02" + b"K\x01" * (size // 2) + b"cos\nsystem\n.")


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def header(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
    return out.getvalue()


@of("data")
def zeros_that_nobody_wants(path: Path, size: int) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in ("zzz", "x"):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                file.write(header((size * 500,), "|u1"))
                for _ in range(size * 500 >> 20):
                    file.write(bytes(1 << 20))


@of("data")
def zeros_that_are_wanted(path: Path, size: int) -> None:
    count = size * 100
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, descr, shape in (("x", "<f4", (count // 24, 6)), ("target", "<i8", (count // 24,))):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                file.write(header(shape, descr))
                left = int(np.prod(shape)) * int(descr[-1])
                while left:
                    file.write(bytes(min(left, 1 << 20)))
                    left -= min(left, 1 << 20)


@of("data")
def more_than_there_is(path: Path, size: int) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header((1 << 40, 6)) + bytes(size))
        archive.writestr("target.npy", header((1 << 40,), "<i8"))


@of("data")
def many_arrays(path: Path, size: int) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(size // 256):
            archive.writestr(f"{i}.npy", npy(np.zeros(1, np.float32)))


@of("data")
def compressed_in_another_way(path: Path, size: int) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", npy(np.zeros((size * 20, 6), np.float32)))


@of("adapters")
def deep_configuration(path: Path, size: int) -> None:
    path.write_text("[" * size)


@of("adapters")
def many_patterns(path: Path, size: int) -> None:
    patterns = {f"{i:x}": 1 for i in range(size // 12)}
    path.write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": patterns}))


@of("adapters")
def a_long_number(path: Path, size: int) -> None:
    path.write_text(f'{{"peft_type": "LORA", "lora_alpha": {"9" * size}}}')


@of("adapters")
def many_lists(path: Path, size: int) -> None:
    path.write_text(f'{{"peft_type": "LORA", "target_modules": [{"[]," * (size // 3)}[]]}}')


def safetensors(entries: dict[str, Any], data: bytes = b"") -> bytes:
    head = json.dumps(entries, separators=(",", ":")).encode()
    return struct.pack("<Q", len(head)) + head + data


@of("checkpoint")
def many_tensors(path: Path, size: int) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path.write_bytes(safetensors({f"{i}": entry for i in range(size // 56)}))


@of("checkpoint")
def many_axes(path: Path, size: int) -> None:
    path.write_bytes(safetensors({"x": {"dtype": "F32", "shape": [1] * (size // 2), "data_offsets": [0, 4]}}, b"1234"))


@of("checkpoint")
def much_metadata(path: Path, size: int) -> None:
    path.write_bytes(safetensors({"__metadata__": {f"{i}": "" for i in range(size // 10)}}))


@of("plan")
def a_deep_plan(path: Path, size: int) -> None:
    path.write_text('{"format": ' + "[" * size)


@of("plan")
def many_objects(path: Path, size: int) -> None:
    path.write_text('{"format": [' + "{}," * (size // 3) + "{}]}")


@of("CSV")
def many_intervals(path: Path, size: int) -> None:
    path.write_text("id,lower,upper,size\n" + "".join(f"{i},0,1,1\n" for i in range(size // 12)))


@of("CSV")
def one_long_field(path: Path, size: int) -> None:
    path.write_text(f"id,lower,upper,size\n{'x' * size},0,1,{'1' * size}\n")


@of("CSV")
def empty_lines(path: Path, size: int) -> None:
    path.write_text("id,lower,upper,size\n" + "\n" * size)


@of("TOML")
def a_deep_key(path: Path, size: int) -> None:
    path.write_text(f"{'a.' * (size // 2)}a = 1\n")


@of("TOML")
def many_deep_tables(path: Path, size: int) -> None:
    long = ".".join(["a"] * int(size**0.5))
    path.write_text("".join(f"[{long}.b{i}]\n" for i in range(size // (len(long) + 8))))


@of("TOML")
def many_keys(path: Path, size: int) -> None:
    path.write_text("".join(f"a{i}={{}}\n" for i in range(size // 10)))


@of("TOML")
def nested_arrays(path: Path, size: int) -> None:
    path.write_text(f"a = {'[' * (size // 2)}{']' * (size // 2)}\n")


def save(
    path: Path, nodes: list[Any], tensors: dict[str, Any] | None = None, functions: list[Any] | None = None
) -> None:
    """An ONNX file: x of two floats to y."""
    given = [numpy_helper.from_array(np.asarray(array), name) for name, array in (tensors or {}).items()]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], given)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=functions or [])
    path.write_bytes(model.SerializeToString())


NODE = helper.make_node
LAST = NODE("Neg", ["x"], ["y"])
ROOM = {"s": np.array([1 << 17])}
LARGE = NODE("ConstantOfShape", ["s"], ["c0"], value=numpy_helper.from_array(np.array([1])))


@of("ONNX")
def a_chain(path: Path, size: int) -> None:
    count = size // 22
    save(
        path,
        [NODE("Neg", [f"{i}" if i else "x"], [f"{i + 1}"]) for i in range(count)] + [NODE("Neg", [f"{count}"], ["y"])],
    )


@of("ONNX")
def known_values(path: Path, size: int) -> None:
    save(path, [LARGE, *(NODE("Add", [f"c{i}", "c0"], [f"c{i + 1}"]) for i in range(size // 30)), LAST], ROOM)


@of("ONNX")
def known_tables(path: Path, size: int) -> None:
    value = numpy_helper.from_array(np.array([1]))
    save(path, [*(NODE("ConstantOfShape", ["s"], [f"c{i}"], value=value) for i in range(size // 60)), LAST], ROOM)


@of("ONNX")
def known_products(path: Path, size: int) -> None:
    square = [LARGE, *(NODE("MatMul", [f"c{i}", "c0"], [f"c{i + 1}"]) for i in range(size // 30)), LAST]
    save(path, square, {"s": np.array([350, 350])})


@of("ONNX")
def a_known_convolution(path: Path, size: int) -> None:
    made = NODE("ConstantOfShape", ["s"], ["c"], value=numpy_helper.from_array(np.array([1], np.uint8)))
    save(
        path, [made, NODE("ConvInteger", ["c", "c"], ["d"], pads=[500] * 4), LAST], {"s": np.array([1, 1, 1000, 1000])}
    )


@of("ONNX")
def doubled_again_and_again(path: Path, size: int) -> None:
    nodes = [NODE("Concat", [f"c{i}", f"c{i}"], [f"c{i + 1}"], axis=0) for i in range(size // 40)]
    save(path, [*nodes, LAST], {"c0": np.array([1])})


@of("ONNX")
def many_operands(path: Path, size: int) -> None:
    save(path, [NODE("Sum", ["x"] * (size // 4), ["y"])])


@of("ONNX")
def one_table_joined_often(path: Path, size: int) -> None:
    nodes = [NODE("Concat", ["c"] * 300, [f"d{i}"], axis=0) for i in range(size // 1000)]
    save(path, [*nodes, LAST], {"c": np.ones(400, np.int64)})


@of("ONNX")
def functions_that_call_two(path: Path, size: int) -> None:
    functions = []
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    for i in range(min(60, size // 100)):
        name, domain = (f"f{i - 1}", "own") if i else ("Neg", "")
        body = [NODE(name, ["a"], ["m"], domain=domain), NODE(name, ["m"], ["b"], domain=domain)]
        functions.append(helper.make_function("own", f"f{i}", ["a"], ["b"], body, opsets))
    save(path, [NODE(f"f{len(functions) - 1}", ["x"], ["y"], domain="own")], functions=functions)


@of("ONNX")
def many_tables(path: Path, size: int) -> None:
    save(path, [LAST], {f"w{i}": np.zeros(1, np.float32) for i in range(size // 24)})


@of("ONNX")
def a_table_for_each_node(path: Path, size: int) -> None:
    count = size // 50
    tables = {f"w{i}": np.full(1, i, np.float32) for i in range(count)}
    nodes = [NODE("Add", [f"a{i}" if i else "x", f"w{i}"], [f"a{i + 1}"]) for i in range(count)]
    save(path, [*nodes, NODE("Neg", [f"a{count}"], ["y"])], tables)


@of("ONNX")
def long_shapes(path: Path, size: int) -> None:
    save(path, [NODE("Reshape", ["x", "s"], ["z"]), LAST], {"s": np.ones(size // 8, np.int64)})


@of("ONNX")
def one_branch_in_another(path: Path, size: int) -> None:
    body = helper.make_graph([NODE("Neg", ["x"], ["r"])], "b", [], [helper.make_tensor_value_info("r", 1, [2])])
    for i in range(min(60, size // 100)):
        node = NODE("If", ["c"], [f"o{i}"], then_branch=body, else_branch=body)
        body = helper.make_graph([node], "b", [], [helper.make_tensor_value_info(f"o{i}", 1, [2])])
        if body.ByteSize() > size:
            break
    last = body.output[0].name
    save(path, [*body.node, NODE("Neg", [last], ["y"])], {"c": np.array(True)})
