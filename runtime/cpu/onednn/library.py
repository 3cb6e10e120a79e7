"""oneDNN's C API, as far as it is used: where the library is found, its functions, and its constants.

Source: oneDNN 3.x, include/oneapi/dnnl/dnnl.h, dnnl_common.h and dnnl_types.h (https://uxlfoundation.github.io/oneDNN).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint, c_void_p
from functools import lru_cache
from pathlib import Path

from foreplan.base.errors import TargetError
from foreplan.runtime.kernel import Refused

WHEEL = "onednn-cpu-gomp"
MAJOR = 3
MAX_RANK = 12
CPU = 1  # dnnl_engine_kind_t
IN_ORDER = 1  # dnnl_stream_flags_t
ANY = 1  # dnnl_format_tag_t: the primitive chooses
USER_SCRATCHPAD = 1  # dnnl_scratchpad_mode_t

DATA_TYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "int32": 4, "int8": 5, "uint8": 6}  # dnnl_data_type_t

FORWARD = 96  # dnnl_prop_kind_t: for inference; training differs for pooling and normalisation only
DIRECT, ADD, MUL, SUB = 1, 0x1FFF0, 0x1FFF1, 0x1FFF5  # dnnl_alg_kind_t: dnnl_convolution_direct, dnnl_binary_*

# dnnl_query_t
QUERY_IMPLEMENTATION = 8
QUERY_SRC, QUERY_DIFF_SRC, QUERY_WEIGHTS, QUERY_DIFF_WEIGHTS, QUERY_DST, QUERY_DIFF_DST = range(129, 135)
QUERY_SCRATCHPAD = 136
MD_STRIDES, MD_RANK, MD_DIMS, MD_PADDED_DIMS, MD_FORMAT_KIND = 14, 256, 257, 260, 262
MD_BLOCKS, MD_BLOCK_SIZES, MD_BLOCK_AXES = 263, 264, 265
BLOCKED = 2  # dnnl_format_kind_t

# Arguments of primitives: DNNL_ARG_*
SRC, OTHER, DST, WEIGHTS, BIAS, SCRATCHPAD = 1, 2, 17, 33, 41, 80
DIFF_SRC, DIFF_DST, DIFF_WEIGHTS = 129, 145, 161
AFTER = 32768  # times (1 + the number of a following operation), combined with its SRC_1 or WEIGHTS

ISA = {  # dnnl_cpu_isa_t
    0x1: "SSE4.1", 0x3: "AVX", 0x7: "AVX2", 0xF: "AVX2 with VNNI", 0x1F: "AVX2 with VNNI 2", 0x27: "AVX-512",
    0x67: "AVX-512 with VNNI", 0xE7: "AVX-512 with bfloat16", 0x1EF: "AVX-512 with float16", 0xFEF: "AMX",
    0x1FEF: "AMX with float16",
}  # fmt: skip

Dims = c_int64 * MAX_RANK


class Argument(ctypes.Structure):
    """dnnl_exec_arg_t: which argument, and a memory object."""

    _fields_ = [("arg", c_int), ("memory", c_void_p)]


class _Version(ctypes.Structure):
    _fields_ = [
        ("major", c_int), ("minor", c_int), ("patch", c_int), ("hash", c_char_p), ("cpu", c_uint), ("gpu", c_uint),
    ]  # fmt: skip


_STATUS = {
    1: "out of memory", 2: "invalid arguments", 3: "not implemented", 4: "last implementation", 5: "runtime error",
}  # fmt: skip


def raise_for(status: int) -> int:
    """Raise `Refused` for any status but success."""
    if status:
        raise Refused(f"oneDNN says {_STATUS.get(status, status)}")
    return status


_DESCRIPTIONS = [c_void_p] * 4  # of source, weights, bias or none, and destination
_GEOMETRY = [POINTER(c_int64)] * 4  # strides, dilations, low and high padding
_FUNCTIONS: dict[str, list[type]] = {
    "dnnl_engine_create": [POINTER(c_void_p), c_int, c_size_t],
    "dnnl_stream_create": [POINTER(c_void_p), c_void_p, c_uint],
    "dnnl_stream_wait": [c_void_p],
    "dnnl_set_primitive_cache_capacity": [c_int],
    "dnnl_memory_desc_create_with_strides": [POINTER(c_void_p), c_int, POINTER(c_int64), c_int, POINTER(c_int64)],
    "dnnl_memory_desc_create_with_tag": [POINTER(c_void_p), c_int, POINTER(c_int64), c_int, c_int],
    "dnnl_memory_desc_destroy": [c_void_p],
    "dnnl_memory_desc_query": [c_void_p, c_int, c_void_p],
    "dnnl_memory_create": [POINTER(c_void_p), c_void_p, c_void_p, c_void_p],
    "dnnl_memory_destroy": [c_void_p],
    "dnnl_primitive_attr_create": [POINTER(c_void_p)],
    "dnnl_primitive_attr_destroy": [c_void_p],
    "dnnl_primitive_attr_set_scratchpad_mode": [c_void_p, c_int],
    "dnnl_primitive_attr_set_post_ops": [c_void_p, c_void_p],
    "dnnl_post_ops_create": [POINTER(c_void_p)],
    "dnnl_post_ops_destroy": [c_void_p],
    "dnnl_post_ops_append_sum": [c_void_p, c_float, c_int32, c_int],
    "dnnl_post_ops_append_binary": [c_void_p, c_int, c_void_p],
    "dnnl_post_ops_append_prelu": [c_void_p, c_int],
    "dnnl_primitive_desc_query": [c_void_p, c_int, c_int, c_void_p],
    "dnnl_primitive_desc_next_impl": [c_void_p],
    "dnnl_primitive_desc_destroy": [c_void_p],
    "dnnl_primitive_create": [POINTER(c_void_p), c_void_p],
    "dnnl_primitive_destroy": [c_void_p],
    "dnnl_primitive_execute": [c_void_p, c_void_p, c_int, POINTER(Argument)],
    "dnnl_reorder_primitive_desc_create": [POINTER(c_void_p), *[c_void_p] * 5],
    "dnnl_matmul_primitive_desc_create": [POINTER(c_void_p), c_void_p, *_DESCRIPTIONS, c_void_p],
    "dnnl_binary_primitive_desc_create": [POINTER(c_void_p), c_void_p, c_int, *[c_void_p] * 4],
    "dnnl_convolution_forward_primitive_desc_create": [
        POINTER(c_void_p), c_void_p, c_int, c_int, *_DESCRIPTIONS, *_GEOMETRY, c_void_p,
    ],
    "dnnl_convolution_backward_data_primitive_desc_create": [
        POINTER(c_void_p), c_void_p, c_int, *[c_void_p] * 3, *_GEOMETRY, c_void_p, c_void_p,
    ],
    "dnnl_convolution_backward_weights_primitive_desc_create": [
        POINTER(c_void_p), c_void_p, c_int, *_DESCRIPTIONS, *_GEOMETRY, c_void_p, c_void_p,
    ],
}  # fmt: skip


class Library:
    """The loaded library, with one engine and one stream.

    Attributes:
        functions: the shared library; functions that give a status raise `Refused` for any but success.
        path: where it was found.
        version: such as "3.2.0".
        engine, stream: oneDNN's own handles.
        openmp: the runtime of its threads, GCC's.
    """

    def __init__(self, functions: ctypes.CDLL, path: str) -> None:
        self.functions, self.path = functions, path
        functions.dnnl_version.restype = POINTER(_Version)
        found = functions.dnnl_version().contents
        self.version = f"{found.major}.{found.minor}.{found.patch}"
        if found.major != MAJOR:
            raise TargetError(f"{path} is oneDNN {self.version}, and the target cpu needs {MAJOR}.x; {_ADVICE}")
        for name, arguments in _FUNCTIONS.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = arguments, raise_for
        functions.dnnl_memory_desc_get_size.argtypes = [c_void_p]
        functions.dnnl_memory_desc_get_size.restype = c_size_t
        functions.dnnl_memory_desc_equal.argtypes = [c_void_p, c_void_p]
        functions.dnnl_primitive_desc_query_md.argtypes = [c_void_p, c_int, c_int]
        functions.dnnl_primitive_desc_query_md.restype = c_void_p
        self.openmp = ctypes.CDLL("libgomp.so.1")
        self.openmp.GOMP_parallel.argtypes = [c_void_p, c_void_p, c_uint, c_uint]
        self.openmp.GOMP_parallel.restype = None
        self.engine, self.stream = c_void_p(), c_void_p()
        functions.dnnl_engine_create(self.engine, CPU, 0)
        functions.dnnl_stream_create(self.stream, self.engine, IN_ORDER)
        # For a known description, oneDNN's cache gives a copy that points to the attributes of the first one. If these
        # are gone, primitives of the copy do not add, or end the process. foreplan keeps kernels itself, and needs no
        # second cache.
        functions.dnnl_set_primitive_cache_capacity(0)

    @property
    def isa(self) -> str:
        """The instruction set that the library makes code for on this machine."""
        found = self.functions.dnnl_get_effective_cpu_isa()
        return ISA.get(found, f"instruction set {found:#x}")


_ADVICE = f"install it with `pip install 'foreplan[cpu]'` (the wheel {WHEEL}), or use the target numpy"


@lru_cache(maxsize=1)
def library() -> Library:
    """oneDNN, loaded once.

    Raises:
        TargetError: it is not installed, cannot be loaded, or is too old; says how to get it.
    """
    failure = "it is not installed"
    for path in _places():
        try:
            return Library(ctypes.CDLL(path), path)
        except OSError as error:
            failure = f"{path} cannot be loaded: {error}"
            if "libgomp" in str(error):
                failure += " (libgomp comes with GCC: apt install libgomp1)"
    raise TargetError(f"the target cpu needs oneDNN: {failure}; {_ADVICE}")


def _places() -> Iterator[str]:
    """The wheel's library, in this environment or the user's own, then the system's."""
    import site

    for prefix in (sys.prefix, site.getuserbase()):
        path = Path(prefix) / "lib" / f"libdnnl.so.{MAJOR}"
        if path.exists():
            yield str(path)
    found = ctypes.util.find_library("dnnl")
    if found:
        yield found
