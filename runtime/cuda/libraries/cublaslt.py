"""cuBLASLt, by ctypes: products of matrices within given scratch memory. Only this file calls the library.

Names and numbers are those of its headers cublasLt.h, cublas_api.h and library_types.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from foreplan.base.errors import PlanError, TargetError
from foreplan.runtime.cuda.launch import Matrix, Multiply
from foreplan.runtime.cuda.libraries.libraries import library_files

CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32 = 68, 77
CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF = 0, 2, 14
CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB = 3, 4
CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_MATMUL_DESC_BIAS_POINTER = 7, 8
CUBLASLT_EPILOGUE_BIAS = 4
CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 5, 6
CUBLASLT_REDUCTION_SCHEME_NONE, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 0, 2
CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1
CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3
CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5
CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6
CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7
CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
CUBLASLT_ALGO_CONFIG_ID, CUBLASLT_ALGO_CONFIG_SPLITK_NUM = 0, 2

ALIGNMENT = 16  # bytes, the most alignment that is told: kernels load no more at once, and plans move values
CANDIDATES = 8  # algorithms asked of the heuristics: the first ones may turn out to be unusable
# Scratch memory that the heuristics are asked for first. Asked for less, they may rank an algorithm first that takes 20
# times as long as one that gets by with it: of 533 products on an H200 (cuBLASLt 13.1), those with scratch memory take
# a quarter of the time this way.
GENEROUS = 32 << 20
# An algorithm that leaves out the last terms of sums that do not divide into equal parts, on Hopper and Blackwell, from
# cuBLAS 12.6.3 until CUDA 13.4 Update 1 (release notes of CUDA 13.4, issue 6580689). With fewer parts, into which they
# divide, it takes no longer: gradients of 16 x 32 weights by 1,605,632 positions, bfloat16, 50 us in 128 parts as in
# 132, and 3,573 us in one (H200, cuBLASLt 13.1).
FAULTY = 66
LEAST_SHARE = 0.5  # of the parts that the heuristics offer
_TYPES = {"float32": CUDA_R_32F, "float16": CUDA_R_16F, "bfloat16": CUDA_R_16BF}
_ADVICE = "`pip install 'foreplan[cuda13]'`, or 'foreplan[cuda12]' for a driver older than 580, brings it"


class Algorithm(ctypes.Structure):
    """`cublasLtMatmulAlgo_t`."""

    _fields_ = (("data", c_uint64 * 8),)


class Found(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algo", Algorithm),
        ("workspaceSize", c_size_t),
        ("state", c_int),
        ("wavesCount", c_float),
        ("reserved", c_int * 4),
    )


_SETTER = (c_void_p, c_int, c_void_p, c_size_t)  # what, which attribute, its value and how many bytes it has
_MATRIX = (c_void_p, c_void_p)  # where it lies, and how
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (POINTER(c_void_p),),
    "cublasLtMatmulDescCreate": (POINTER(c_void_p), c_int, c_int),
    "cublasLtMatmulDescSetAttribute": _SETTER,
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatrixLayoutCreate": (POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutSetAttribute": _SETTER,
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceCreate": (POINTER(c_void_p),),
    "cublasLtMatmulPreferenceSetAttribute": _SETTER,
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, POINTER(Found), POINTER(c_int)),
    "cublasLtMatmulAlgoCheck": (*(c_void_p,) * 6, POINTER(Algorithm), POINTER(Found)),
    "cublasLtMatmulAlgoConfigGetAttribute": (POINTER(Algorithm), c_int, c_void_p, c_size_t, POINTER(c_size_t)),
    "cublasLtMatmulAlgoConfigSetAttribute": (POINTER(Algorithm), c_int, c_void_p, c_size_t),
    "cublasLtMatmul": (
        *(c_void_p, c_void_p, POINTER(c_float), *_MATRIX, *_MATRIX, POINTER(c_float), *_MATRIX, *_MATRIX),
        *(POINTER(Algorithm), c_void_p, c_size_t, c_void_p),
    ),
}


class Descriptor:
    """An object of cuBLASLt that is made, set and destroyed.

    Attributes:
        pointer: to it, as further calls take it.
    """

    def __init__(self, library: Cublaslt, kind: str, *arguments: int) -> None:
        """One of a `kind` such as `MatmulDesc`.

        Raises:
            RuntimeError: cuBLASLt refuses it.
        """
        self.library, self.kind, self.pointer = library, kind, c_void_p()
        library.call(f"cublasLt{kind}Create", byref(self.pointer), *arguments)

    def set(self, attribute: int, value: ctypes._SimpleCData[Any]) -> None:
        """Give an attribute a value of exactly its type."""
        size = ctypes.sizeof(value)
        self.library.call(f"cublasLt{self.kind}SetAttribute", self.pointer, attribute, byref(value), size)

    def __del__(self) -> None:
        if self.pointer:
            getattr(self.library.library, f"cublasLt{self.kind}Destroy")(self.pointer)


class Cublaslt:
    """The library, loaded.

    Attributes:
        version: such as "13.1.0".
        cuda: the CUDA version that it was built for, such as 13000.
    """

    def __init__(self, path: str) -> None:
        """Loads a file.

        Raises:
            OSError: it is no library that can be loaded.
        """
        self.library = ctypes.CDLL(path)
        for name, arguments in SIGNATURES.items():
            getattr(self.library, name).argtypes = arguments
        for name in ("cublasLtGetVersion", "cublasLtGetCudartVersion"):
            getattr(self.library, name).restype = c_size_t
        self.library.cublasLtGetStatusName.restype = ctypes.c_char_p
        number = self.library.cublasLtGetVersion()
        self.version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        self.cuda = self.library.cublasLtGetCudartVersion()
        self._handle = c_void_p()

    def call(self, name: str, *arguments: object) -> None:
        """A function of the library.

        Raises:
            RuntimeError: it fails; in cuBLASLt's words.
        """
        if status := getattr(self.library, name)(*arguments):
            raise RuntimeError(
                f"{name} of cuBLASLt {self.version}: {self.library.cublasLtGetStatusName(status).decode()}"
            )

    @property
    def handle(self) -> c_void_p:
        """The library's handle on the current card; made at first use, and kept."""
        if not self._handle:
            self.call("cublasLtCreate", byref(self._handle))
        return self._handle

    def multiplying(
        self, product: Multiply, places: tuple[int, ...], workspace: int, stream: int
    ) -> Callable[[], None]:
        """Products as a ready call, by the first usable algorithm of cuBLASLt's heuristics.

        Split sums are added up in scratch memory, in float32 and in one order: equal calls give equal bits.

        Args:
            places: addresses of a, b, c and d, and of the bias, if there is one.
            workspace: the address of the product's scratch memory.

        Raises:
            PlanError: no algorithm gets by with the scratch memory.
            RuntimeError: cuBLASLt fails; in its words.
        """
        return _Multiplying(self, product, places, workspace, stream)


class _Multiplying:
    """A call with its arguments, which live as long as the call."""

    def __init__(
        self, library: Cublaslt, product: Multiply, places: tuple[int, ...], workspace: int, stream: int
    ) -> None:
        matrices = (product.a, product.b, product.c, product.d)
        compute = CUBLAS_COMPUTE_32F_FAST_TF32 if product.tf32 else CUBLAS_COMPUTE_32F
        operation = Descriptor(library, "MatmulDesc", compute, CUDA_R_32F)
        for attribute, turned in (
            (CUBLASLT_MATMUL_DESC_TRANSA, product.transpose_a),
            (CUBLASLT_MATMUL_DESC_TRANSB, product.transpose_b),
        ):
            operation.set(attribute, c_int32(CUBLAS_OP_T if turned else CUBLAS_OP_N))
        if product.bias is not None:  # its address comes first: the choice of an algorithm depends on its alignment
            operation.set(CUBLASLT_MATMUL_DESC_EPILOGUE, c_uint32(CUBLASLT_EPILOGUE_BIAS))
            operation.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, c_void_p(places[4]))
        layouts = [_layout(library, matrix, product.batch) for matrix in matrices]
        found = _chosen(library, operation, layouts, product, places)
        self.library, self.kept = library, (operation, layouts, found)
        one, beta = c_float(1), c_float(1 if product.adds else 0)
        operands = [each for pair in zip(places, (x.pointer for x in layouts)) for each in pair]
        self.arguments = (
            *(library.handle, operation.pointer, byref(one), *operands[:4], byref(beta), *operands[4:]),
            # Some algorithms check the address, which must be a multiple of 256, even of an empty workspace.
            *(byref(found.algo), workspace if product.nbytes else None, product.nbytes, stream),
        )

    def __call__(self) -> None:
        self.library.call("cublasLtMatmul", *self.arguments)


def _layout(library: Cublaslt, matrix: Matrix, batch: int) -> Descriptor:
    shape = (matrix.rows, matrix.columns, matrix.leading)
    found = Descriptor(library, "MatrixLayout", _TYPES[matrix.dtype.name], *shape)
    found.set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, c_int32(batch))
    found.set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, c_int64(matrix.stride))
    return found


def _chosen(
    library: Cublaslt,
    operation: Descriptor,
    layouts: list[Descriptor],
    product: Multiply,
    places: tuple[int, ...],
) -> Found:
    """The first usable algorithm of the heuristics, within the scratch memory and for such addresses."""
    given = [library.handle, operation.pointer, *(layout.pointer for layout in layouts)]
    reasons = []
    for nbytes, scheme in _questions(product.nbytes):
        try:
            offered = _offered(library, given, places, nbytes, scheme)
        except RuntimeError as error:
            reasons.append(str(error))
            continue
        for found in offered:
            reason = _unusable(library, given, found, product)
            if not reason:
                return found
            reasons.append(reason)
    said = ", ".join(dict.fromkeys(reasons or ["it has no algorithm for it"]))
    raise PlanError(
        f"cuBLASLt {library.version} cannot multiply {product} within {product.nbytes} bytes of workspace: "
        f"{said}; install another version of cuBLAS, or compile again with another limit of workspace"
    )


def _questions(nbytes: int) -> list[tuple[int, int]]:
    """What the heuristics are asked for, in turn: a limit of scratch memory, and how split sums are added up. The last
    question allows no split sums, of which no terms can be left out.
    """
    allowed = [(nbytes, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE), (0, CUBLASLT_REDUCTION_SCHEME_NONE)]
    return [(GENEROUS, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE), *allowed] if 0 < nbytes < GENEROUS else allowed


def _offered(library: Cublaslt, given: list[Any], places: tuple[int, ...], nbytes: int, scheme: int) -> list[Found]:
    """What the heuristics offer, the fastest first as they see it.

    Raises:
        RuntimeError: they refuse the question.
    """
    wanted = Descriptor(library, "MatmulPreference")
    wanted.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, c_uint64(nbytes))
    wanted.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, c_uint32(scheme))
    for attribute, place in zip(
        (
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ),
        places,
    ):
        wanted.set(attribute, c_uint32(min(ALIGNMENT, place & -place)))
    found, count = (Found * CANDIDATES)(), c_int()
    library.call("cublasLtMatmulAlgoGetHeuristic", *given, wanted.pointer, CANDIDATES, found, byref(count))
    return list(found[: count.value])


def _unusable(library: Cublaslt, given: list[Any], found: Found, product: Multiply) -> str:
    """Why an algorithm cannot be used; empty if it can. One that would leave out terms is given fewer parts of sums."""
    if found.state:
        return "it has no algorithm for it"
    parts = _setting(library, found.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM)
    leaves_out = product.terms % max(1, parts) and _setting(library, found.algo, CUBLASLT_ALGO_CONFIG_ID) == FAULTY
    if leaves_out and not _divided_evenly(library, found, product.terms, parts):
        return f"its algorithm {FAULTY} may leave out terms of sums in {parts} parts"
    needed, checked = found.workspaceSize, Found()
    if leaves_out or needed <= product.nbytes:
        try:
            library.call("cublasLtMatmulAlgoCheck", *given, byref(found.algo), byref(checked))
        except RuntimeError as error:
            return str(error)
        needed = checked.workspaceSize if leaves_out else needed
    return f"its algorithm needs {needed}" if needed > product.nbytes else ""


def _divided_evenly(library: Cublaslt, found: Found, terms: int, parts: int) -> bool:
    """Set the number of parts of sums to the most, up to `parts`, into which the terms divide; or set nothing, and
    return False, where these would be far fewer.
    """
    fewer = next(n for n in range(parts, 0, -1) if terms % n == 0)
    if fewer < LEAST_SHARE * parts:
        return False
    value = c_int32(fewer)
    library.call(
        "cublasLtMatmulAlgoConfigSetAttribute", byref(found.algo), CUBLASLT_ALGO_CONFIG_SPLITK_NUM, byref(value), 4
    )
    return True


def _setting(library: Cublaslt, algorithm: Algorithm, attribute: int) -> int:
    """A setting of an algorithm."""
    value, size = c_int32(), c_size_t()
    library.call("cublasLtMatmulAlgoConfigGetAttribute", byref(algorithm), attribute, byref(value), 4, byref(size))
    return value.value


def opened(cuda: int) -> Cublaslt:
    """cuBLASLt for a major version of CUDA, such as 13.

    Raises:
        TargetError: it is not installed; says how to get it.
    """
    others = []
    for path in library_files("cublasLt"):
        try:
            found = Cublaslt(path)
        except OSError:
            continue
        if found.cuda // 1000 == cuda:
            return found
        others.append(f"{found.version}, for CUDA {found.cuda // 1000}")
    there = f"there is {', '.join(others)}; " if others else ""
    raise TargetError(f"the plan multiplies by cuBLASLt, which is not installed for CUDA {cuda}: {there}{_ADVICE}")
