"""Which tensors of a model are trained: as the exporter says, by uses and numbers, and by names where these are silent.

`_RULES` has the rules in their order. The first that knows a tensor's role decides, and says why. A rule proves a role,
or guesses it where only a name is left; the import tells what was guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from foreplan.base.patterns import Selection
from foreplan.frontend.onnx.module.contents import differs_by_head, is_zeros_or_ones, uniform_value
from foreplan.frontend.onnx.module.exporter import (
    Exporter,
    is_learned_name,
    is_literal_name,
    is_sure_name,
    is_table_name,
)
from foreplan.frontend.onnx.places import is_round
from foreplan.frontend.onnx.tables import is_irregular, is_written, table_like
from foreplan.frontend.onnx.tensors import FLOATS, WHOLE
from foreplan.frontend.onnx.uses import Functions, Use, find_uses, reads
from foreplan.graph.value import Kind

if TYPE_CHECKING:
    import onnx

# Op → the inputs that are weights; running statistics apart.
_WEIGHT_SLOTS: dict[str, tuple[int, ...]] = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "Gemm": (0, 1, 2),
    "MatMul": (0, 1),
    "FusedMatMul": (0, 1),
    "BatchNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "SimplifiedLayerNormalization": (1,),
    "RMSNormalization": (1,),
    "PRelu": (1,),
    "Gather": (0,),
    "GatherND": (0,),
    "GatherElements": (0,),
    "RNN": (1, 2, 3),
    "GRU": (1, 2, 3),
    "LSTM": (1, 2, 3, 7),
    "Einsum": tuple(range(8)),
    # Of com.microsoft.
    "Attention": (1, 2),
    "MultiHeadAttention": (3,),
    "BiasGelu": (1,),
    "FastGelu": (1,),
    "SkipLayerNormalization": (2, 3, 4),
    "SkipSimplifiedLayerNormalization": (2, 3),
}
_STATISTICS = {"BatchNormalization": (3, 4)}
# A bias or a gain that the exporter wrote as an operation of its own. Differences and quotients with a constant are
# normalisations of data far more often than anything learned.
_BIAS_SLOTS = {"Add": (0, 1), "Mul": (0, 1), "Sum": tuple(range(8))}
# Ops that bring a learned tensor that is not a matrix, such as a class token, to the data.
_TOKEN_SLOTS = {"Expand": (0,), "Concat": tuple(range(64)), "Tile": (0,)}
_NORMS = {name for name in _WEIGHT_SLOTS if name.endswith("Normalization")}


@dataclass(frozen=True)
class Role:
    """What a tensor is to the model.

    Attributes:
        kind: PARAMETER, FROZEN, BUFFER or CONSTANT.
        why: for people; empty for what nobody would take for a weight.
        guessed: whether a name decided, where neither use nor numbers tell.
    """

    kind: Kind
    why: str = ""
    guessed: bool = False


_MOST_BODIES = 256  # whose roles are kept
_CHOSEN = {True: Kind.PARAMETER, False: Kind.FROZEN}
NO_ROLE = Role(Kind.CONSTANT)
LEARNED = Role(Kind.PARAMETER, "made by the exporter, and filled as by training")
LEFT_OVER = Role(Kind.CONSTANT, "made by the exporter, and in no weight's place")


def find_roles(
    nodes: Sequence[onnx.NodeProto],
    initializers: Iterable[onnx.TensorProto] = (),
    functions: Functions | None = None,
    exporter: Exporter | None = None,
) -> dict[str, Role]:
    """The roles of the tensors that stand in one scope: initializers, Constants, and those filled with one number.

    A weight that reaches its place through other constants (a transposed matrix, a reshaped scale, a weight that is a
    norm times a direction) makes parameters of the tensors that it was computed from. Only tensors of floats can be
    trained; this is checked where they are stored.
    """
    exporter = exporter or Exporter()
    uses = find_uses(nodes, initializers, functions or {}, exporter.path)
    cases: dict[str, _Case] = {}
    for name, found in uses.found.items():
        cases[name] = _Case(name, uses.held[name], found, name in uses.initializers, exporter, cases)
    return {name: next(role for rule in _RULES if (role := rule(case)) is not None) for name, case in cases.items()}


class RolesOfBodies:
    """As `find_roles`, of bodies that are walked again and again: with each step of a loop, each call of a function.

    Args:
        functions: of the model.
    """

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._found: dict[int, tuple[object, dict[str, Role]]] = {}

    def of(
        self,
        body: onnx.GraphProto | onnx.FunctionProto,
        initializers: Iterable[onnx.TensorProto] = (),
        exporter: Exporter | None = None,
    ) -> dict[str, Role]:
        """Of the tensors of one body, which does not change."""
        found = self._found.get(id(body))
        if found is None:
            if len(self._found) >= _MOST_BODIES:
                self._found.clear()
            found = body, find_roles(body.node, initializers, self._functions, exporter)
            self._found[id(body)] = found  # which holds the body, so that no other one gets its identity
        return found[1]


def chosen_roles(roles: Mapping[str, Role], selection: Selection) -> Mapping[str, Role]:
    """The roles, but for what the user wants trained or frozen.

    Raises:
        UsageError: a pattern means nothing, or nothing that can be trained.
    """
    if not selection:
        return roles
    trainable = {name: bool(role.why) and role.kind is not Kind.BUFFER for name, role in roles.items()}
    weights = {name for name, role in roles.items() if role.kind is Kind.PARAMETER}
    chosen = selection.chosen(trainable, weights)
    return {**roles, **{name: Role(_CHOSEN[trained], why) for name, (trained, why) in chosen.items()}}


@dataclass(frozen=True)
class _Case:
    """A tensor whose role is asked for.

    Attributes:
        tensor: None where a node makes it of a number.
        initializer: whether it stands in the file as a weight does, and not as a node's attribute.
        cases: those of all tensors, by name.
    """

    name: str
    tensor: onnx.TensorProto | None
    uses: Sequence[Use]
    initializer: bool
    exporter: Exporter
    cases: Mapping[str, _Case]

    @cached_property
    def made(self) -> bool:
        """Whether the exporter has made it."""
        return self.exporter.made(self.name)

    @cached_property
    def weights(self) -> list[Use]:
        """The uses in the place of a weight. What the exporter made, and one number, stand there as they are."""
        apart = self.made or self.single
        return [use for use in reads(self.uses, _WEIGHT_SLOTS) if use.direct or not apart]

    @cached_property
    def single(self) -> bool:
        """Whether it has one element."""
        if self.tensor is not None:
            return math.prod(self.tensor.dims) == 1
        return bool(self.uses) and all(use.axes == 0 for use in self.uses)

    @cached_property
    def completes(self) -> bool:
        """Whether it is one long axis that scales or shifts what a contraction or a normalisation gives."""
        return any(use.direct and use.completes and use.axes == 1 for use in self.uses)

    @cached_property
    def number(self) -> float | None:
        """What stands everywhere in it; None: several numbers, or it is not known."""
        return None if self.tensor is None else uniform_value(self.tensor, self.exporter.path)

    @cached_property
    def table(self) -> str:
        """Why its numbers are those of a table; empty: they may be learned."""
        return (
            "" if self.tensor is None else table_like(self.tensor, self.exporter.path, self.exporter.tells(self.name))
        )


def _of_its_type(case: _Case) -> Role | None:
    """Only floats are trained, and integers that floats are restored from."""
    if case.tensor is None or case.tensor.data_type in FLOATS:
        return None
    restored = bool(case.uses) and all(use.restored for use in case.uses) and case.tensor.data_type in WHOLE
    return None if restored else NO_ROLE


def _as_told(case: _Case) -> Role | None:
    """A record of the exporter's proves most; and batch normalisation tells its statistics by their place."""
    if any(reads(case.uses, _STATISTICS)):
        return Role(Kind.BUFFER, "a running statistic")
    told = case.exporter.kinds.get(case.name)
    if told == "PARAMETER":
        return Role(Kind.PARAMETER, "a parameter, as the exporter says")
    return None if told is None else Role(Kind.CONSTANT, "a buffer, as the exporter says")


def _without_gradient(case: _Case) -> Role | None:
    """Comparisons, conditions, indices and extents pass no gradient."""
    return Role(Kind.CONSTANT, "no gradient reaches it") if all(use.blind for use in case.uses) else None


def _by_source(case: _Case) -> Role | None:
    """What was computed from a parameter is one, and none what was computed from buffers alone."""
    if source := case.exporter.learned_source(case.name):
        return Role(Kind.CONSTANT, case.table) if case.table else _trained(f"computed by the exporter from {source!r}")
    if source := case.exporter.buffer_source(case.name):
        return Role(Kind.CONSTANT, f"computed by the exporter from the buffer {source!r}")
    return None


def _by_place(case: _Case) -> Role | None:
    """A formula's place, held by one number, proves that nobody learns it. A mask's place proves a mask."""
    if place := next((use.place for use in case.uses if use.place), ""):
        return Role(Kind.CONSTANT, place)
    if any(use.is_mask and use.direct and (use.axes is None or use.axes > 1) for use in case.uses):
        folded = None if not case.exporter.folded_by(case.name) else case.tensor
        if folded is not None and differs_by_head(folded, case.exporter.path):
            return LEARNED
        return Role(Kind.CONSTANT, "added to attention's scores, as masks are")
    return None


def _by_numbers(case: _Case) -> Role | None:
    """Numbers that keep a rule prove a table: training leaves noise. What exporters have left over is told of apart."""
    if case.made and not (case.weights or case.completes):
        return None
    if case.table:
        return Role(Kind.CONSTANT, case.table)
    partners = [case.cases[use.partner] for use in case.uses if use.partner in case.cases]
    if partners and all(each.table for each in partners) and case.number == 0:
        return Role(Kind.CONSTANT, "the zeros that a product with a table has for a bias")
    return None


def _by_hand(case: _Case) -> Role | None:
    """Several numbers of few digits that shift or scale data prove means and deviations, which people wrote."""
    shifts = bool(case.uses) and all(use.op in ("Add", "Sub", "Mul", "Div") and not use.completes for use in case.uses)
    if shifts and case.tensor is not None and is_written(case.tensor, case.exporter.path):
        return Role(Kind.CONSTANT, "numbers of few digits, as people write them")
    return None


def _by_way(case: _Case) -> Role | None:
    """Sines, scattered entries and products of constants prove parts of tables, but against a PyTorch module's name."""
    if not case.uses or not all(use.way for use in case.uses) or case.exporter.tells(case.name):
        return None
    return Role(Kind.CONSTANT, case.uses[0].way)


def _one_number(case: _Case) -> Role | None:
    """A weight's place proves that one number is learned, and so does a PyTorch module's name. Others are guesses."""
    if not case.single or case.weights or case.made or case.exporter.tells(case.name):
        return None
    if any(use.is_bias and use.direct for use in case.uses):
        return _trained("added to a product of one column, as biases are")
    plain = case.number is None or is_round(case.number)
    divides = any(use.op == "Div" for use in case.uses) and plain
    # A bare `scale` of 0.125 is attention's; no formula multiplies by 0 or 1.
    within = not plain or any(sign in case.name for sign in "./")
    within = within or (case.number in (0, 1) and all(use.op == "Mul" for use in case.uses))
    if is_sure_name(case.name) or (within and is_learned_name(case.name, divides)):
        return Role(Kind.PARAMETER, "one number, and learned, by its name", guessed=True)
    if is_literal_name(case.name):
        return Role(Kind.CONSTANT, "one number, and none that is learned, by its name", guessed=not plain)
    if case.exporter.names_module(case.name) and not plain:
        return Role(Kind.PARAMETER, "one number that no formula has, and a module's, by its name", guessed=True)
    return Role(Kind.CONSTANT, "one number, in no weight's place", guessed=not plain)


def _by_name(case: _Case) -> Role | None:
    """A PyTorch module's name proves a parameter or a buffer; names of other tools in its form are guesses."""
    literal = is_literal_name(case.name) and not case.exporter.is_torch
    if literal or not case.exporter.names_module(case.name):
        return None
    if any(use.is_basis for use in case.uses) and not case.name.endswith("weight"):
        return Role(Kind.CONSTANT, "multiplied to sines and cosines of the product, as random features are")
    placed = any(use.direct for use in case.weights) and not case.exporter.is_torch
    if is_table_name(case.name) and not placed:
        return Role(Kind.CONSTANT, f"called {case.name.rpartition('.')[2]!r}, as tables are")
    return _trained("a module's, by its name")


def _by_use(case: _Case) -> Role:
    """The place of a weight, a bias or a gain proves a parameter, as far as the exporter does not fill it."""
    if case.made:
        return _made(case)
    if case.weights:
        return _trained(f"in the place of a {case.weights[0].op}'s weight")
    learned = case.initializer or (case.tensor is not None and is_irregular(case.tensor, case.exporter.path))
    shifts = any(use.axes == 1 or (learned and use.direct) for use in reads(case.uses, _BIAS_SLOTS))
    if shifts and not case.single:
        return _trained("added or multiplied, as biases and gains are")
    if learned and any(use.direct for use in reads(case.uses, _TOKEN_SLOTS)):
        return _trained("joined to the data, as tokens are")
    return Role(Kind.CONSTANT, "in no weight's place")


def _made(case: _Case) -> Role:
    """The role of what the exporter made."""
    completes, folded = case.completes, case.exporter.folded_by(case.name)
    if case.tensor is None:
        return LEFT_OVER
    if not (case.weights or completes):
        # In a name of TorchScript's stands the reader.
        brought = any(use.direct for slots in (_BIAS_SLOTS, _TOKEN_SLOTS) for use in reads(case.uses, slots))
        learned = (brought and folded) or folded in ("MatMul", "Gemm")
        return LEARNED if learned and is_irregular(case.tensor, case.exporter.path) else LEFT_OVER
    of_module = completes and not case.weights and folded
    unit = (completes or case.weights[0].op in _NORMS) and not of_module
    if unit and is_zeros_or_ones(case.tensor, case.exporter.path):
        return Role(Kind.CONSTANT, "one number everywhere, as norms without scale and shift have it")
    if case.weights:
        return _trained(f"in the place of a {case.weights[0].op}'s weight")
    return _trained("scales or shifts a product or a normalisation")


def _trained(why: str) -> Role:
    return Role(Kind.PARAMETER, why)


_RULES: tuple[Callable[[_Case], Role | None], ...] = (
    _of_its_type,
    _as_told,
    _without_gradient,
    _by_source,
    _by_place,
    _by_numbers,
    _by_hand,
    _by_way,
    _one_number,
    _by_name,
    _by_use,
)
