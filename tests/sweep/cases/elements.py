"""Drawn expressions of elements, masks of bits and random numbers."""

from __future__ import annotations

import math
from random import Random

from foreplan.base.errors import ForeplanError
from foreplan.graph import DType, TensorType, as_dtype
from foreplan.graph.types import DTYPES
from foreplan.ops.bits import BYTE, MaskedMap, PackBits
from foreplan.ops.expr import FUNCTIONS, Arg, Call, Const, Expr
from foreplan.ops.map import Map
from foreplan.ops.multi_map import MultiMap
from foreplan.ops.random import STATE
from foreplan.ops.random import Random as Numbers
from tests.kernels import COMPUTED
from tests.sweep.case import Case, Given
from tests.sweep.draws import INTEGER_TYPES, any_type, broadcastable, float_type, given, plain, shape

# Functions of floats, by how often; all of FUNCTIONS are drawn sometimes.
COMMON = ("add", "sub", "mul", "div", "max", "min", "exp", "tanh", "sigmoid", "relu", "sqrt", "where", "square", "neg")
SMOOTH = ("add", "sub", "mul", "sigmoid", "tanh", "sin", "cos", "square", "erf", "atan", "asinh", "neg", "exp")


def expression(rng: Random, args: int, depth: int, functions: tuple[str, ...]) -> Expr:
    """An expression of the given number of arguments."""
    if depth == 0 or rng.random() < 0.15:
        if rng.random() < 0.2:
            return Const(rng.choice([0.5, 2.0, -1.0, 0.0, 1, 2, 3]))
        return Arg(rng.randrange(args))
    if rng.random() < 0.06:
        return Call(rng.choice(COMPUTED).name, (expression(rng, args, depth - 1, functions),))
    name = rng.choice(functions) if rng.random() < 0.6 else rng.choice(list(FUNCTIONS))
    if name == "where":
        test = Call(rng.choice(["lt", "ge", "eq"]), tuple(expression(rng, args, 0, functions) for _ in range(2)))
        return Call("where", (test, *(expression(rng, args, depth - 1, functions) for _ in range(2))))
    return Call(name, tuple(expression(rng, args, depth - 1, functions) for _ in range(FUNCTIONS[name].arity)))


def _types(rng: Random, count: int) -> list[DType]:
    first = float_type(rng) if rng.random() < 0.75 else as_dtype(rng.choice((*INTEGER_TYPES, "bool")))
    return [first if rng.random() < 0.8 else any_type(rng) for _ in range(count)]


def map_(rng: Random) -> Case:
    """One or several expressions of tensors that broadcast."""
    while True:
        types = _types(rng, rng.choice([1, 1, 2, 2, 3, 4]))
        exprs = [expression(rng, len(types), rng.randint(1, 3), COMMON) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        extents = shape(rng, 0, 4, 2048)
        shapes = [extents, *(broadcastable(rng, extents) for _ in types[1:])]
        op = Map(tuple(map(str, exprs)))
        try:
            op.infer([TensorType(type, extents) for type in types])
        except ForeplanError:
            continue
        return Case(op, tuple(given(rng, type, each) for type, each in zip(types, shapes)))


def smooth_map(rng: Random) -> Case:
    """Of functions that have derivatives everywhere."""
    count = rng.choice([1, 2, 3])
    expr: Expr = Arg(0)
    for _ in range(rng.randint(1, 4)):
        name = rng.choice(SMOOTH)
        others = [rng.choice([Arg(rng.randrange(count)), Const(0.5)]) for _ in range(FUNCTIONS[name].arity - 1)]
        expr = Call(name, (Call("tanh", (expr,)) if name == "exp" else expr, *others))
    extents = shape(rng, 0, 3, 64)
    shapes = [extents, *(broadcastable(rng, extents) for _ in range(count - 1))]
    return Case(Map((str(expr),)), tuple(plain(rng, DTYPES["float64"], each) for each in shapes))


def multi_map(rng: Random) -> Case:
    """An optimizer's update of several tensors, with numbers that all share."""
    dtype, count = float_type(rng), rng.randint(1, 4)
    exprs, own, shared = rng.choice(
        [
            (("(a0 - (a2 * a1))",), 2, 1),
            (("(a0 - (a3 * ((0.9 * a1) + a2)))", "((0.9 * a1) + a2)"), 3, 1),
            (("(a0 * 0.5)",), 1, 0),
        ]
    )
    shapes = [shape(rng, 0, 3, 256) for _ in range(count)]
    inputs = [plain(rng, dtype, each) for each in shapes for _ in range(own)]
    return Case(MultiMap(exprs, own, count), (*inputs, *(plain(rng, dtype, ()) for _ in range(shared))))


def _in_eights(rng: Random) -> tuple[int, ...]:
    extents = list(shape(rng, 1, 4, 512))
    extents[rng.randrange(len(extents))] *= 8
    return tuple(extents)


def pack_bits(rng: Random) -> Case:
    """A condition of each element."""
    condition = rng.choice(["(a0 > 0.0)", "(a0 <= 1.0)", "ne(a0, 0)", "isnan(a0)"])
    dtype = float_type(rng) if condition.startswith("isnan") else any_type(rng)
    return Case(PackBits(condition), (given(rng, dtype, _in_eights(rng)),))


def masked_map(rng: Random) -> Case:
    """What a mask lets through."""
    exprs, count = rng.choice(
        [(("where(a0, a1, 0.0)",), 1), (("where(a0, (a1 * a2), a2)",), 2), (("where(a0, a1, 0.0)", "(a1 + a2)"), 2)]
    )
    extents, dtype = _in_eights(rng), float_type(rng)
    others = [given(rng, dtype, each) for each in (extents, *(broadcastable(rng, extents) for _ in range(count - 1)))]
    bits = Given(TensorType(BYTE, (math.prod(extents) // 8,)), "bits", rng.getrandbits(16))
    return Case(MaskedMap(exprs), (bits, *others))


def random_(rng: Random) -> Case:
    """Numbers of every distribution, whole blocks of words and parts of one."""
    distribution = rng.choice(["uniform", "normal", "bernoulli"])
    dtype = any_type(rng) if distribution == "bernoulli" else float_type(rng)
    op = Numbers(
        distribution,
        shape(rng, 0, 4),
        dtype,
        rng.choice([0, 1, 7, 2**32 - 1]),
        low=rng.choice([0.0, -1.0, 0.75]),
        high=rng.choice([1.0, 3.0, 2.5]),
        mean=rng.choice([0.0, 3.0]),
        std=rng.choice([1.0, 0.1]),
        p=rng.choice([0.0, 0.5, 0.1, 1.0]),
    )
    return Case(op, (Given(STATE, "bits", rng.getrandbits(16)),))
