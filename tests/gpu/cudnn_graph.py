"""The operations that a serialised plan of cuDNN's says it runs, run by NumPy in float64 on memory."""

from __future__ import annotations

import ctypes
import json
import re
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

TYPES = {"CUDNN_DATA_FLOAT": np.float32, "CUDNN_DATA_BFLOAT16": ml_dtypes.bfloat16, "CUDNN_DATA_HALF": np.float16}
SCALAR = re.compile(rb"i[\x01-\x05](\d+)\{i\x05indexi.i\x05valueSi\x08([0-9A-F]{8})\}", re.DOTALL)
BINARY = {"MUL": np.multiply, "SUB": np.subtract, "ADD": np.add, "DIV": np.divide, "CMP_GE": np.greater_equal}
UNARY = {"EXP": np.exp, "LOG": np.log, "IDENTITY": np.positive}


def written_by_cudnn(blob: bytes) -> dict[str, Any]:
    """What cuDNN itself has written into the plan; the frontend's part lies around it."""
    text = blob[blob.index(b'{"cudnnVersion"') :].decode("latin1")
    found: dict[str, Any] = json.JSONDecoder().raw_decode(text)[0]
    return found


def memory_at(blob: bytes, places: Mapping[int, int]) -> dict[int, np.ndarray]:
    """What `execute` takes, of tensors that begin at addresses."""
    found = {}
    for about in written_by_cudnn(blob)["operationGraph"]["tensors"]:
        address = places.get(int(about["name"]))
        if address is not None:
            size = 1 + sum((extent - 1) * step for extent, step in zip(about["dim"], about["stride"]))
            dtype = np.dtype(TYPES[about["dataType"]])
            memory = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
            found[int(about["name"])] = np.ndarray(size, dtype, memory)
    assert found.keys() == places.keys()
    return found


def execute(blob: bytes, memory: Mapping[int, np.ndarray]) -> None:
    """Run a plan.

    Args:
        memory: flat arrays, by the numbers of tensors; how these lie is taken from the plan.
    """
    graph = written_by_cudnn(blob)["operationGraph"]
    tensors = {each["name"]: each for each in graph["tensors"]}
    known: dict[str, Any] = {}
    for number, bits in SCALAR.findall(blob[blob.index(b"pass_by_values") :]):
        known[number.decode()] = struct.unpack(">f", bytes.fromhex(bits.decode()))[0]

    def array(name: str) -> np.ndarray:
        about, flat = tensors[name], memory[int(name)]
        assert flat.dtype == TYPES[about["dataType"]]
        steps = tuple(step * flat.itemsize for step in about["stride"])
        last = sum((extent - 1) * step for extent, step in zip(about["dim"], about["stride"]))
        assert last < flat.size, "a plan reaches beyond its tensor"
        return np.lib.stride_tricks.as_strided(flat, about["dim"], steps)

    def get(name: str) -> Any:
        if name not in known:
            known[name] = array(name).astype(np.float64)
        return known[name]

    def put(name: str, value: np.ndarray) -> None:
        assert list(value.shape) == tensors[name]["dim"]
        known[name] = value
        if int(name) in memory:  # what else has memory lies in the workspace
            array(name)[...] = value

    with np.errstate(all="ignore"):
        for node in graph["nodes"]:
            _execute(node, get, put, tensors)


def _execute(node: dict[str, Any], get: Any, put: Any, tensors: Mapping[str, Any]) -> None:
    kind = node["operation"].removeprefix("CUDNN_BACKEND_OPERATION_").removesuffix("_DESCRIPTOR")
    if kind == "MATMUL":
        a, b = get(node["matA"]), get(node["matB"])
        # Neighbouring heads share keys: cuDNN's documentation of grouped queries.
        put(node["matC"], a @ np.repeat(b, a.shape[1] // b.shape[1], axis=1))
        return
    x, y = get(node["X"]), node["Y"]
    shape = tensors[y]["dim"]
    if kind == "RESHAPE":
        here, there = tensors[node["X"]]["stride"], tensors[y]["stride"]
        assert there == [*here[:2], here[3], here[2]], "no transposition"
        put(y, x.swapaxes(2, 3))
    elif kind == "REDUCTION":
        fold = np.max if node["reductionOp"].endswith("MAX") else np.sum
        assert node["reductionOp"] in ("CUDNN_REDUCE_TENSOR_MAX", "CUDNN_REDUCE_TENSOR_ADD")
        if 1 < shape[1] < x.shape[1]:  # heads that share keys
            x = x.reshape(x.shape[0], shape[1], -1, *x.shape[2:])
            put(y, fold(x, axis=2))
        else:
            axes = tuple(axis for axis in range(4) if shape[axis] != x.shape[axis])
            put(y, fold(x, axis=axes, keepdims=True))
    else:
        assert kind == "POINTWISE" and node["alpha1"] == node["alpha2"] == 1
        mode = node["pointwiseMode"].removeprefix("CUDNN_POINTWISE_")
        if mode == "GEN_INDEX":
            put(y, np.broadcast_to(np.arange(x.shape[node["axis"]]).reshape(-1, *[1] * (3 - node["axis"])), x.shape))
        elif mode == "BINARY_SELECT":
            put(y, np.where(get(node["T"]), x, get(node["B"])))
        else:
            put(y, UNARY[mode](x) if mode in UNARY else BINARY[mode](x, get(node["B"])))
