"""Kernels on a card as plain data: launches and copies, without pointers and arrays.

A session binds them to addresses; tests run the same ones on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol

from foreplan.base.units import align_up, ceil_div
from foreplan.graph import DType, Op, Window
from foreplan.graph.layouts import lie_alike
from foreplan.graph.op import Windows
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.kernel import Refused

FOLDER = Path(__file__).parents[2] / "cuda"
ALIGNMENT = 256  # bytes; of every value and workspace
STANDARD = "-std=c++17"
THREADS = 256  # threads of a block, unless a kernel has another number
MAPS = ("map.cu", "multi_map.cu", "pack_bits.cu")  # which compute expressions of a graph

Grid = tuple[int, int, int]
Defines = tuple[tuple[str, str | int | DType], ...]
# Elements as they lie in memory.
STORED: Mapping[str, str] = {
    "float64": "double",
    "float32": "float",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "bool",
}


@dataclass(frozen=True)
class Arithmetic:
    """How kernels may compute.

    Attributes:
        tf32: whether they may round float32 to TensorFloat-32 on its way into products.
        deterministic: whether results must have the same bits each time.
        strict: whether kernels are left out that multiply sums of numbers, by Winograd's or Fourier's transforms.
    """

    tf32: bool = False
    deterministic: bool = True
    strict: bool = False


USUAL = Arithmetic()


def stored(dtype: DType) -> str:
    """The C++ type of an element in memory; elements that are only stored are bytes."""
    return STORED["uint8" if dtype.is_storage else dtype.name]


@dataclass(frozen=True)
class Source:
    """A translation unit: a file of cuda/ with its macros.

    Attributes:
        file: its name in cuda/.
        defines: macros and their values.
        generated: text behind the file, such as a function that the file declares.
    """

    file: str
    defines: tuple[tuple[str, str | int], ...] = ()
    generated: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """Options of a compiler. Maps round each product and each sum, as NumPy does. So an expression has the same
        bits everywhere, fused with others or not, and a mask agrees with the values that it masks.
        """
        return (STANDARD, *(["-fmad=false"] if self.file in MAPS else []))

    @property
    def text(self) -> str:
        """The text for a compiler; it finds included files in `FOLDER`."""
        macros = [f"#define {name} {value}\n" for name, value in self.defines]
        return f'{"".join(macros)}#include "{self.file}"\n{self.generated}'


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """A digest of all files of cuda/: a part of the key of compiled code."""
    files = sorted(file for file in FOLDER.iterdir() if file.suffix in (".cu", ".cuh"))
    return sha256(b"".join(file.name.encode() + b"\n" + file.read_bytes() for file in files)).hexdigest()


@dataclass(frozen=True)
class Address:
    """A place in a kernel's operands or workspace.

    Attributes:
        of: what it lies in.
        index: which input or output.
        offset: bytes from the first element.
    """

    of: Literal["input", "output", "workspace"]
    index: int = 0
    offset: int = 0

    def behind(self, nbytes: int) -> Address:
        """The place some bytes further."""
        return Address(self.of, self.index, self.offset + nbytes)


def input_at(index: int, offset: int = 0) -> Address:
    """The place some bytes behind the first element of an input."""
    return Address("input", index, offset)


def output_at(index: int, offset: int = 0) -> Address:
    """The place some bytes behind the first element of an output."""
    return Address("output", index, offset)


def workspace_at(offset: int = 0) -> Address:
    """The place some bytes behind the beginning of the workspace."""
    return Address("workspace", 0, offset)


Word = Address | int | float


@dataclass(frozen=True)
class Launch:
    """A kernel function run on a grid of blocks.

    Attributes:
        source: where it is.
        entry: its name.
        grid: blocks.
        block: threads of each.
        arguments: the members of its one structure, eight bytes each: an address, an int64 or a double.
        shared: bytes of shared memory of each block, beside what the source itself declares.
    """

    source: Source
    entry: str
    grid: Grid
    block: Grid
    arguments: tuple[Word, ...]
    shared: int = 0


@dataclass(frozen=True)
class Copy:
    """Bytes copied; nothing where they are the same bytes already."""

    target: Address
    source: Address
    nbytes: int


@dataclass(frozen=True)
class Clear:
    """Bytes set to zero."""

    target: Address
    nbytes: int


@dataclass(frozen=True)
class Execute:
    """A run of one of cuDNN's plans.

    Attributes:
        blob: the plan, serialised.
        operands: its tensors' numbers, and where they lie.
        workspace: where its own scratch memory lies, and how many bytes it has.
    """

    blob: bytes = field(repr=False)
    operands: tuple[tuple[int, Address], ...]
    workspace: Address
    nbytes: int


@dataclass(frozen=True)
class Matrix:
    """A matrix whose columns lie one behind the other, as in BLAS, and the further matrices of its batch.

    Attributes:
        start: where its first element lies.
        dtype: of its elements.
        rows, columns: as it lies, before it is transposed.
        leading: elements from one column to the next; at least `rows`.
        stride: elements from one matrix of the batch to the next; 0: the same one for all.
    """

    start: Address
    dtype: DType
    rows: int
    columns: int
    leading: int
    stride: int


@dataclass(frozen=True)
class Multiply:
    """Products of matrices by cuBLASLt, one call: d = op(a) op(b), with c added, and with a number for each row of d.

    Attributes:
        a, b, c, d: the factors, the summand, and the result, which may be c. Without a summand, c is d.
        transpose_a, transpose_b: whether op turns the matrix around.
        adds: whether c is added.
        batch: how many products.
        tf32: whether float32 may be rounded to TensorFloat-32 first. Sums are float32 in any case.
        workspace: where its scratch memory lies, and how many bytes it has at most.
        bias: the place of the numbers that are added to all columns, side by side and of d's type; None: no bias.
    """

    a: Matrix
    b: Matrix
    c: Matrix
    d: Matrix
    transpose_a: bool
    transpose_b: bool
    adds: bool
    batch: int
    tf32: bool
    workspace: Address
    nbytes: int
    bias: Address | None = None

    @property
    def places(self) -> tuple[Address, ...]:
        """Where a, b, c and d lie, and the bias, if there is one."""
        matrices = (self.a.start, self.b.start, self.c.start, self.d.start)
        return matrices if self.bias is None else (*matrices, self.bias)

    @property
    def terms(self) -> int:
        """The number of terms of an element."""
        return self.a.rows if self.transpose_a else self.a.columns

    def __str__(self) -> str:
        """For people, in the words of BLAS: m, n and k, and the rest."""
        types = f"{self.a.dtype} to {self.d.dtype}"
        many = f", {self.batch} times" if self.batch > 1 else ""
        return f"{self.d.rows} x {self.d.columns} x {self.terms}, {types}{many}"


@dataclass(frozen=True)
class Exchange:
    """An exchange with other ranks, by NCCL, which begins: it goes on beside later work, until an `Await`.

    Attributes:
        kind, peer: see `foreplan.ops.collective.Begin`; or one side of a message, and the rank on the other side.
        source: what this rank sends, and `nbytes` its bytes; of a message that is received, where it arrives.
        target: where it arrives, or where an `Await` looks for it.
        ranks, stride: see `foreplan.ops.collective.Collective`.
        own: the number in its group of the rank that sends or receives a message.
    """

    kind: str
    peer: int
    source: Address
    target: Address
    nbytes: int
    ranks: int
    stride: int
    own: int = 0


@dataclass(frozen=True)
class Await:
    """Later work waits for the exchange or the message that arrives at a place."""

    target: Address


@dataclass(frozen=True)
class Choose:
    """What each rank of a group runs, in their order; these launch nothing.

    Attributes:
        stride: see `foreplan.ops.collective.Collective`.
    """

    choices: tuple[Instruction, ...]
    stride: int


Instruction = Launch | Copy | Clear | Execute | Multiply | Exchange | Await | Choose


@dataclass(frozen=True)
class LaunchKernel:
    """One op on tensors that lie in a certain way.

    Attributes:
        instructions: one after the other.
        workspace: bytes of scratch memory, exact.
        overwrites: pairs (output, input): that output may take exactly that input's bytes.
        parts: triples (output, input, byte): that input may lie within that output already, from that byte on.
        nanoseconds: predicted, where there are several for an op; None: as the card's profile has the op's cost.
        payload: further data in a plan, beside the kernel's name, to make the kernel again: a plan of cuDNN.
        alignment: bytes of which every operand's address must be a multiple.
    """

    instructions: tuple[Instruction, ...]
    workspace: int = 0
    overwrites: tuple[tuple[int, int], ...] = ()
    parts: tuple[tuple[int, int, int], ...] = ()
    nanoseconds: int | None = None
    payload: bytes = field(default=b"", repr=False)
    alignment: int = 1


class Make(Protocol):
    """Makes the kernel of an op on tensors that lie in a certain way."""

    def __call__(self, op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
        """The kernel.

        Raises:
            Refused: there is none for such tensors.
        """


def relocated(each: Instruction, moved: Callable[[Address], Address]) -> Instruction:
    """An instruction with every place that it reads or writes replaced by another."""
    if isinstance(each, Launch):
        words = (moved(word) if isinstance(word, Address) else word for word in each.arguments)
        return replace(each, arguments=tuple(words))
    if isinstance(each, Copy | Exchange):
        return replace(each, target=moved(each.target), source=moved(each.source))
    if isinstance(each, Clear | Await):
        return replace(each, target=moved(each.target))
    if isinstance(each, Choose):
        return replace(each, choices=tuple(relocated(choice, moved) for choice in each.choices))
    if isinstance(each, Execute):
        operands = tuple((uid, moved(place)) for uid, place in each.operands)
        return replace(each, operands=operands, workspace=moved(each.workspace))
    a, b, c, d = (replace(x, start=moved(x.start)) for x in (each.a, each.b, each.c, each.d))
    bias = None if each.bias is None else moved(each.bias)
    return replace(each, a=a, b=b, c=c, d=d, workspace=moved(each.workspace), bias=bias)


def added_in_place(inputs: Windows, y: Window) -> tuple[tuple[int, int], ...]:
    """The pair of a result and the third input, its summand, if both have the same layout."""
    return ((0, 2),) if len(inputs) == 3 and lie_alike(inputs[2], y) else ()


def side_by_side(most: int, extent: int, tensors: Iterable[tuple[int, int, Iterable[int]]]) -> int:
    """Elements along an axis that a thread can take together: a divisor of `most` and of the axis' extent.

    Args:
        tensors: of each, the bytes of an element, the step from one to the next along the axis, and other steps, after
            which as many lie side by side.
    """
    numbers = [extent]
    for item, step, others in tensors:
        if extent > 1 and step != item:
            return 1
        numbers += [other // item for other in others]
    return math.gcd(most, *numbers)


def channels_side_by_side(most: int, tensors: Sequence[Window]) -> int:
    """Channels of images that a thread can take together in every tensor."""
    lying = []
    for x in tensors:
        others = [step for axis, step in enumerate(x.strides) if axis != 1 and x.shape[axis] > 1]
        lying.append((x.type.dtype.itemsize, x.strides[1], others))
    return side_by_side(most, tensors[0].shape[1], lying)


class Scratch:
    """Workspace given out piece by piece.

    Attributes:
        nbytes: given out so far.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> Address:
        """The address of `nbytes` more bytes, aligned."""
        start = align_up(self.nbytes, ALIGNMENT)
        self.nbytes = start + nbytes
        return workspace_at(start)


def launch(
    file: str,
    entry: str,
    blocks: int | Grid,
    arguments: Iterable[Word],
    defines: Defines = (),
    *,
    threads: int = THREADS,
    generated: str = "",
    shared: int = 0,
) -> Launch:
    """A launch of blocks of `threads` threads along one axis.

    Args:
        shared: bytes of shared memory of each block, see `Launch`.
        file, defines, generated: see `Source`; an element type becomes its C++ type in memory, a bool 0 or 1.

    Raises:
        Refused: a grid has no room for these blocks.
    """
    grid = (blocks, 1, 1) if isinstance(blocks, int) else blocks
    if not (0 < grid[0] < 1 << 31 and 0 < grid[1] < 1 << 16 and 0 < grid[2] < 1 << 16):
        raise Refused(f"a grid of {grid} blocks")
    macros = tuple((name, _macro(value)) for name, value in defines)
    return Launch(Source(file, macros, generated), entry, grid, (threads, 1, 1), tuple(arguments), shared)


def holding(ticks: int) -> Launch:
    """A launch that holds the card back by a number of its clock's ticks."""
    return launch("hold.cu", "hold", 1, [ticks], threads=1)


def for_each(
    file: str, entry: str, count: int, arguments: Iterable[Word], defines: Defines = (), *, generated: str = ""
) -> Launch:
    """A launch of whole blocks that has a thread for each of `count`; likewise."""
    return launch(file, entry, ceil_div(count, THREADS), arguments, defines, generated=generated)


def _macro(value: str | int | DType) -> str | int:
    return stored(value) if isinstance(value, DType) else int(value) if isinstance(value, bool) else value
