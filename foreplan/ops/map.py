"""`map`: all element-wise mathematics in one op, several results at once; its NumPy kernel works in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.base.units import align_up
from foreplan.graph import Builder, DType, Op, TensorType, Value, as_dtype, register
from foreplan.graph.axes import Axes, Factors
from foreplan.graph.op import Arrays, Cotangents, Types, Values
from foreplan.graph.types import DTYPES, FLOAT32, FLOAT64, Shape, broadcast_shapes
from foreplan.ops.expr import (
    FUNCTIONS,
    Arg,
    Call,
    Const,
    Expr,
    as_expr,
    cast,
    derivative,
    infer_dtypes,
    is_zero,
    parse_expr,
    promote,
    scalar_flops,
    simplify,
    subexpressions,
    substitute,
    used_args,
)
from foreplan.ops.shape import sum_to_shape

BLOCK = 16 * 1024  # elements a block: registers of a few blocks stay in a core's cache


@register
@dataclass(frozen=True)
class Map(Op):
    """y_i = expr_i(a0, a1, …) at each element; inputs broadcast as NumPy's do, all outputs have the common shape.

    Attributes:
        exprs: one scalar expression an output, as text; they read the inputs as a0, a1, …
    """

    name: ClassVar[str] = "map"
    any_strides: ClassVar[bool] = True
    exprs: tuple[str, ...]

    @property
    def moves(self) -> bool:
        """If each expression is an input as it is: a copy."""
        return all(isinstance(expr, Arg) for expr in self.parsed)

    @property
    def parsed(self) -> tuple[Expr, ...]:
        """The expressions themselves."""
        return _parse(self.exprs)

    @property
    def is_sum(self) -> bool:
        """Whether it adds its second input to its first one, and no more."""
        return self.parsed == (Arg(0) + Arg(1),)

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The broadcast shape, with each expression's own element type."""
        if not inputs:
            raise ShapeError("map needs at least one input")
        shape = broadcast_shapes(*(type.shape for type in inputs))
        dtypes = _result_dtypes(self.exprs, tuple(type.dtype for type in inputs))
        return tuple(TensorType(dtype, shape) for dtype in dtypes)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All tensors alike, but for what broadcasts."""
        f, y = Factors(), outputs[0]
        return f.axes([f.spread("a", x.shape, y.rank) for x in inputs], [f.row("a", y.shape)] * len(outputs))

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Symbolic: one map for each wanted input, summed over the axes along which it was broadcast.

        For a wide input of a narrow result, the terms are narrow and their sum is wide. Where the results are several,
        as those of a recurrent layer's gates, so are those of one map for all inputs of their type.
        """
        n = len(inputs)
        flows: dict[int, Expr] = {}
        arguments = [*inputs, *outputs, *(c if c is not None else o for c, o in zip(cotangents, outputs))]
        for i, (expr, cotangent) in enumerate(zip(self.parsed, cotangents)):
            if cotangent is not None:
                for index, flow in derivative(expr, Arg(n + len(outputs) + i), Arg(n + i)).items():
                    flows[index] = flows[index] + flow if index in flows else flow
        gradients: list[Value | None] = [None] * n
        wanted = {i: flow for i, flow in flows.items() if inputs[i].dtype.is_float and b.wants(inputs[i])}
        alike = [i for i in wanted if len(outputs) > 1 and inputs[i].type == outputs[0].type]
        if len(alike) > 1:
            used = used_args(*(wanted[i] for i in alike))
            fns = [cast(_renumber(wanted[i], used), inputs[i].dtype) for i in alike]
            together = elementwise_many(b, fns, *(arguments[i] for i in used))
            gradients = [together[alike.index(i)] if i in alike else None for i in range(n)]
        for index, flow in wanted.items():
            if gradients[index] is None:
                x, y = inputs[index], outputs[0]
                sums = x.type.size < y.type.size and x.dtype == y.dtype.wide
                gradient = elementwise(b, flow, *arguments, dtype=y.dtype if sums else x.dtype)
                gradients[index] = sum_to_shape(b, gradient, x.shape, wide=sums)
        return gradients

    def reached(self, inputs: Values) -> Values:
        """Those of a derivative that is not zero for certain."""
        n, count = len(inputs), len(self.parsed)
        flows = [derivative(expr, Arg(n + count + i), Arg(n + i)) for i, expr in enumerate(self.parsed)]
        found = {i for each in flows for i, flow in each.items() if not is_zero(flow)}
        return [x for i, x in enumerate(inputs) if i in found and x.dtype.is_float]

    @property
    def read_by_vjp(self) -> frozenset[int]:
        """The inputs, by number, that the derivative of a single result reads, besides its cotangent and itself."""
        (expr,) = self.parsed
        n = 1 + max(used_args(expr), default=0)
        flows = derivative(expr, Arg(n + 1), Arg(n)).values()
        return frozenset(i for i in used_args(*flows) if i < n)

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """Any output may take the bytes of any input of its own type: blocks are read whole before they are written.

        But outputs are copied one after the other: an input that is itself a later output must still be there.
        """
        conditions = {
            part.args[0].index
            for part in subexpressions(*self.parsed)
            if isinstance(part, Call) and part.function == "where" and isinstance(part.args[0], Arg)
        }
        return tuple(
            (o, i)
            for o, out in enumerate(outputs)
            for i, x in enumerate(inputs)
            if x == out and i not in conditions and Arg(i) not in self.parsed[o + 1 :]
        )

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Scalar operations of the expressions, common ones once, at each element."""
        return scalar_flops(*self.parsed) * outputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """One block a register; none if a single ufunc does all the work."""
        kernel = _compile(self.exprs, tuple(type.dtype for type in inputs))
        return 0 if kernel.direct else kernel.register_bytes(min(BLOCK, outputs[0].size))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Evaluate block by block in registers that live in the workspace."""
        kernel = _compile(self.exprs, tuple(as_dtype(x.dtype) for x in inputs))
        kernel.run(inputs, outputs, workspace)


@lru_cache(maxsize=4096)
def _parse(exprs: tuple[str, ...]) -> tuple[Expr, ...]:
    return tuple(parse_expr(text) for text in exprs)


@lru_cache(maxsize=4096)
def _result_dtypes(exprs: tuple[str, ...], inputs: tuple[DType, ...]) -> tuple[DType, ...]:
    parsed = _parse(exprs)
    types = infer_dtypes(inputs, *parsed)
    return tuple(types[expr] or FLOAT32 for expr in parsed)


@dataclass(frozen=True)
class _Instruction:
    """compute(operands…, out=target); operands and target are ('arg' | 'reg' | 'out', index) or a literal."""

    compute: Callable[..., Any]
    operands: tuple[tuple[str, int] | np.generic, ...]
    target: tuple[str, int]


@dataclass(frozen=True)
class _Kernel:
    """A compiled list of ufunc calls over blocks.

    Attributes:
        registers: element type of each register.
        direct: the only instruction is one ufunc from inputs to the output, so it runs on whole arrays.
    """

    instructions: tuple[_Instruction, ...]
    registers: tuple[DType, ...]
    direct: bool

    def register_bytes(self, block: int) -> int:
        return sum(align_up(block * dtype.itemsize, 64) for dtype in self.registers)

    def run(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        if self.direct:
            (instruction,) = self.instructions
            arrays = [inputs[x[1]] if isinstance(x, tuple) else x for x in instruction.operands]
            instruction.compute(*arrays, out=outputs[0])
            return
        size = outputs[0].size
        if not size:
            return
        block = min(BLOCK, size)
        registers, start = [], 0
        for dtype in self.registers:
            registers.append(workspace[start : start + block * dtype.itemsize].view(dtype.numpy))
            start += align_up(block * dtype.itemsize, 64)
        for args, outs in _blocks(inputs, outputs, block):
            shape = outs[0].shape
            count = outs[0].size
            regs = [register[:count].reshape(shape) for register in registers]
            places = {"arg": args, "reg": regs, "out": outs}
            for step in self.instructions:
                operands = [places[x[0]][x[1]] if isinstance(x, tuple) else x for x in step.operands]
                step.compute(*operands, out=places[step.target[0]][step.target[1]])


def _blocks(inputs: Arrays, outputs: Arrays, block: int) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
    """Matching pieces of at most `block` elements, over views with adjacent axes merged where all operands allow."""
    shape = outputs[0].shape
    arrays = [np.broadcast_to(x, shape) for x in inputs]
    arrays += list(outputs)
    axes = merged_axes(shape, [array.strides for array in arrays])
    shape = tuple(extent for extent, _ in axes)
    merged = [
        np.lib.stride_tricks.as_strided(array, shape, tuple(strides[i] for _, strides in axes))
        for i, array in enumerate(arrays)
    ]
    n = len(inputs)
    # The innermost axes that fit into a block together, and one axis before them, which is cut.
    cut, inner = len(shape) - 1, 1
    while cut > 0 and inner * shape[cut] <= block:
        inner *= shape[cut]
        cut -= 1
    rows = max(1, block // inner)
    for index in np.ndindex(shape[:cut]):
        here = [array[index] for array in merged]
        for start in range(0, shape[cut], rows):
            piece = [array[start : start + rows] for array in here]
            yield piece[:n], piece[n:]


def merged_axes(
    shape: Shape, strides: Sequence[tuple[int, ...]], order: Iterable[int] | None = None
) -> list[tuple[int, tuple[int, ...]]]:
    """(extent, stride of each operand) of axes in an order, by default their own: without axes of extent 1, with
    neighbours merged if all operands allow it.
    """
    axes: list[tuple[int, tuple[int, ...]]] = []
    for axis in range(len(shape)) if order is None else order:
        extent, steps = shape[axis], tuple(each[axis] for each in strides)
        if extent == 1:
            continue
        if axes and all(outer == inner * extent for outer, inner in zip(axes[-1][1], steps)):
            axes[-1] = (axes[-1][0] * extent, steps)
        else:
            axes.append((extent, steps))
    return axes or [(1, tuple(0 for _ in strides))]


@lru_cache(maxsize=4096)
def _compile(texts: tuple[str, ...], dtypes: tuple[DType, ...]) -> _Kernel:
    exprs = _parse(texts)
    types = infer_dtypes(dtypes, *exprs)
    parts = list(subexpressions(*exprs))
    last_use = {arg: i for i, part in enumerate(parts) if isinstance(part, Call) for arg in part.args}
    last_use.update({expr: len(parts) for expr in exprs})
    instructions: list[_Instruction] = []
    registers: list[DType] = []
    free: list[int] = []
    where_is: dict[Expr, tuple[str, int]] = {}

    def take(dtype: DType) -> int:
        for slot in free:
            if registers[slot] == dtype:
                free.remove(slot)
                return slot
        registers.append(dtype)
        return len(registers) - 1

    def operand(arg: Expr, dtype: DType | None) -> tuple[tuple[str, int] | np.generic, int | None]:
        """The place of an argument, converted to `dtype` if need be; and the register that the conversion takes."""
        if isinstance(arg, Const):
            with np.errstate(all="ignore"):  # infinity is a number like any other
                return (dtype or FLOAT32).numpy.type(arg.value), None
        place = ("arg", arg.index) if isinstance(arg, Arg) else where_is[arg]
        if dtype is None or types[arg] == dtype:
            return place, None
        register = take(dtype)
        instructions.append(_Instruction(_convert, (place,), ("reg", register)))
        return ("reg", register), register

    for i, part in enumerate(parts):
        if not isinstance(part, Call):
            continue
        converts = part.function not in FUNCTIONS
        wanted = [None] if converts else operand_dtypes(part, types)
        used = [operand(arg, dtype) for arg, dtype in zip(part.args, wanted)]
        freed = [register for _, register in used if register is not None]
        freed += [where_is[arg][1] for arg in set(part.args) if arg in where_is and last_use[arg] == i]
        single = len(exprs) == 1 and part == exprs[0]
        # `where` writes its target before it has read everything, so it never takes an operand's register.
        if part.function != "where":
            free.extend(freed)
        target = ("out", 0) if single else ("reg", take(types[part] or FLOAT32))
        if part.function == "where":
            free.extend(freed)
        compute = _convert if converts else FUNCTIONS[part.function].compute()
        instructions.append(_Instruction(compute, tuple(place for place, _ in used), target))
        where_is[part] = target
    for i, expr in enumerate(exprs):
        if where_is.get(expr) != ("out", i):
            place, _ = operand(expr, types[expr] or FLOAT32)
            instructions.append(_Instruction(_convert, (place,), ("out", i)))
    direct = len(instructions) == 1 and (
        isinstance(instructions[0].compute, np.ufunc) or instructions[0].compute is _convert
    )
    return _Kernel(tuple(instructions), tuple(registers), direct)


def _convert(x: Any, out: np.ndarray) -> None:
    np.copyto(out, x, casting="unsafe")


def operand_dtypes(part: Call, types: Mapping[Expr, DType | None]) -> list[DType | None]:
    """The element type each argument is converted to before the call."""
    rule = FUNCTIONS[part.function].result
    if part.function == "where":
        return [None, types[part], types[part]]
    if rule != "bool":
        return [types[part]] * len(part.args)
    if part.function in ("and", "or", "xor", "not"):
        return [types[arg] for arg in part.args]
    common = _common_dtype([types[arg] for arg in part.args])
    literals = [arg.value for arg in part.args if isinstance(arg, Const)]
    if common is not None and not all(common.holds(literal) for literal in literals):
        common = FLOAT64  # integers compare with 2.5, infinity and NaN as numbers do
    return [common] * len(part.args)


def _common_dtype(dtypes: Sequence[DType | None]) -> DType | None:
    known = [dtype for dtype in dtypes if dtype is not None]
    return reduce(promote, known) if known else None


def rounded(exprs: Sequence[Expr], args: Sequence[DType], results: Sequence[DType]) -> tuple[Expr, ...]:
    """Expressions that widen their narrow arguments first, and then convert to the types given last."""
    leaves = [cast(Arg(i), dtype.wide) if dtype.is_narrow else Arg(i) for i, dtype in enumerate(args)]
    wide = [substitute(expr, leaves) for expr in exprs]
    types = infer_dtypes(args, *wide)
    return tuple(
        expr if types[expr] == result else cast(expr, result) for expr, result in zip(wide, results, strict=True)
    )


def without_rounding(expr: Expr, args: Sequence[DType]) -> Expr:
    """The expression without its conversions to narrow types, and without those that then have no effect."""
    memo: dict[Expr, Expr] = {}
    for part in subexpressions(expr):
        memo[part] = part
        if not isinstance(part, Call):
            continue
        parts = tuple(memo[arg] for arg in part.args)
        memo[part] = Call(part.function, parts)
        if part.function in DTYPES and DTYPES[part.function].is_float:
            wide = DTYPES[part.function].wide
            memo[part] = parts[0] if infer_dtypes(args, parts[0])[parts[0]] == wide else cast(parts[0], wide)
    return memo[expr]


COPY = Map(("a0",))


def elementwise(
    b: Builder,
    fn: Expr | Callable[..., Expr],
    *inputs: Value,
    dtype: DType | None = None,
    name: str = "",
) -> Value:
    """Apply a scalar function to values; only the inputs it reads are connected.

    Args:
        b: where nodes are added.
        fn: an expression over a0, a1, …, or a function of expressions: `lambda x, y: x * y + 1`.
        inputs: values that a0, a1, … stand for.
        dtype: convert the result to this element type.
        name: of the node.

    Returns:
        The result; the input itself where the function is the identity.

    Raises:
        ShapeError: the expression reads none of its inputs.
    """
    expr = fn if isinstance(fn, Expr) else as_expr(fn(*(Arg(i) for i in range(len(inputs)))))
    used, text = _prepare(expr, tuple(value.dtype for value in inputs), dtype)
    values = [inputs[i] for i in used]
    return values[0] if text == str(Arg(0)) else b.apply(Map((text,)), *values, name=name)


@lru_cache(maxsize=4096)
def _prepare(expr: Expr, inputs: tuple[DType, ...], dtype: DType | None) -> tuple[tuple[int, ...], str]:
    """The inputs that an expression reads, and its text over only these, simplified and converted to a type."""
    used = tuple(used_args(expr))
    if not used:
        raise ShapeError(f"the expression {expr} reads none of its inputs")
    expr = _renumber(expr, used)
    dtypes = [inputs[i] for i in used]
    if dtype is not None and infer_dtypes(dtypes, expr)[expr] != dtype:
        expr = cast(expr, dtype)
    return used, str(simplify(expr, dtypes))


def convert(b: Builder, x: Value, dtype: DType) -> Value:
    """`x` with another element type; itself if it has that one."""
    return elementwise(b, Arg(0), x, dtype=dtype)


def elementwise_many(
    b: Builder, fns: Sequence[Expr], *inputs: Value, name: str = "", outputs: Sequence[str] = ()
) -> tuple[Value, ...]:
    """Several scalar functions of the same values in one pass, such as an optimizer's update."""
    dtypes = [value.dtype for value in inputs]
    exprs = tuple(str(simplify(fn, dtypes)) for fn in fns)
    return b.node(Map(exprs), *inputs, name=name, outputs=outputs)


def _renumber(expr: Expr, used: Sequence[int]) -> Expr:
    places = {index: Arg(new) for new, index in enumerate(used)}
    return substitute(expr, [places.get(i, Arg(0)) for i in range(max(used) + 1)])
