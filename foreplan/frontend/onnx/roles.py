"""Which tensors of a model are trained: as the exporter says, or by names and uses, before anything is translated.

A tensor that a PyTorch module has by name is a parameter, unless it is used, called or filled as tables and masks are.
One that the exporter made is a parameter where it stands in the place of a weight. Of other files, names say nothing:
there a parameter is what stands in the place of a weight, and what is added or multiplied as biases and gains are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foreplan.frontend.onnx.contents import differs_by_head, is_irregular, is_one_number, table_like
from foreplan.frontend.onnx.signature import Signature
from foreplan.frontend.onnx.tensors import FLOATS
from foreplan.frontend.onnx.uses import Functions, Use, Uses, find_uses, reads
from foreplan.graph.ir import Kind
from foreplan.patterns import Selection

if TYPE_CHECKING:
    from pathlib import Path

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

_MODULE_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
# Names that PyTorch's exporters, and the tools behind them, give to tensors of their own.
_EXPORTERS = re.compile(r"onnx::.*|/.*|_?val_\d+.*|const(ant)?s?_?\d*|.*_output_\d+|.*lifted_tensor.*|ortshared_.*")
# What TorchScript's exporter computed from a tensor of the module; constants of the program have other names.
_FOLDED = re.compile(r"onnx::([A-Z]\w*)_\d+")
# The last part of a name that modules give to what they compute once and do not train.
_TABLES = re.compile(
    r"(.*_)?(inv_freq|freqs_cis|(cos|sin)(_cached|_table|_cache)?|rope|pe|sinusoid\w*|masks?|causal\w*|masked_bias|tril"
    r"|triu|adj|adjacency|laplacian|grid|knots|anchors?|bands|mel|mel_\w+|cosines?|sines?|mean_\w+|std_\w+|fb"
    r"|filterbank|window_?|hann|mean|std|var|variance|running_\w+|ema\w*|shadow\w*|slopes|sigmas|betas"
    r"|alphas_cumprod\w*|buffer|buf|zeros?|ones|eye|unit_scale)"
)
# Results of PyTorch's ops, as torch.export calls them: with a number behind all but the first of each.
_RESULTS = re.compile(
    r"_?(add|sub|mul|div|pow|neg|exp|log|sqrt|rsqrt|reciprocal|square|abs|sign|floor|ceil|round|clamp\w*|sin|cos|tanh"
    r"|relu|sigmoid|silu|gelu|softplus|softmax|log_softmax|sum|mean|amax|amin|max|min|prod|cumsum|norm"
    r"|linalg_vector_norm|linear|matmul|mm|bmm|addmm|baddbmm|einsum|outer|clone|copy|detach|alias|contiguous|to|to_copy"
    r"|type_as|view|reshape|flatten|permute|transpose|t|expand\w*|repeat\w*|tile|slice|select|index|index_\w+|gather"
    r"|embedding|unsqueeze|squeeze|cat|stack|split\w*|chunk|getitem|unbind|roll|flip|pad|constant_pad_nd|where"
    r"|masked_fill|triu|tril|eq|ne|lt|gt|le|ge|logical_\w+|bitwise_\w+|any|all|arange|linspace|full\w*|zeros\w*"
    r"|ones\w*|empty\w*|eye|new_\w+|scalar_tensor\w*|lift_fresh_copy|layer_norm|native_\w+|batch_norm|group_norm"
    r"|conv\dd|convolution|dropout|unsafe_\w+)(_\d+)?"
)
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_SOURCES = "pkg.onnxscript.optimizer.folded_from"


@dataclass(frozen=True)
class Role:
    """What a tensor is to the model.

    Attributes:
        kind: PARAMETER, FROZEN, BUFFER or CONSTANT.
        why: for people; empty for what nobody would take for a weight.
    """

    kind: Kind
    why: str = ""


_CHOSEN = {True: Kind.PARAMETER, False: Kind.FROZEN}
NO_ROLE = Role(Kind.CONSTANT)
LEARNED = Role(Kind.PARAMETER, "made by the exporter, and filled as by training")
LEFT_OVER = Role(Kind.CONSTANT, "made by the exporter, and in no weight's place")


@dataclass(frozen=True)
class Exporter:
    """What a file says of its tensors besides their content.

    Attributes:
        is_torch: whether names without a dot are those of a PyTorch module too.
        signature: the tensors of the module, as torch.export knows them.
        kinds: name → PARAMETER, BUFFER or CONSTANT_TENSOR, of those and of the file's.
        sources: name of a tensor that the exporter has computed → names of those that it was computed from.
        path: the file, beside which contents lie.
    """

    is_torch: bool = False
    signature: Signature = field(default_factory=Signature)
    kinds: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)
    path: Path | None = None

    @staticmethod
    def of(proto: onnx.ModelProto, path: Path | None) -> Exporter:
        """What a model's exporter says."""
        signature = Signature.of(proto.graph)
        kinds, sources = dict(signature.kinds), {}
        for told in (*proto.graph.value_info, *proto.graph.initializer, *proto.graph.input):
            for entry in told.metadata_props:
                if entry.key == _KIND:
                    kinds[told.name] = entry.value
                elif entry.key == _SOURCES:
                    sources[told.name] = re.findall(r"'([^']*)'", entry.value)
        return Exporter("pytorch" in proto.producer_name.lower(), signature, kinds, sources, path)

    def names_module(self, name: str) -> bool:
        """Whether a PyTorch module calls a tensor by this name."""
        return self._is_path(name) and not self.made(name)

    def learned_source(self, name: str) -> str:
        """A tensor that training would change, of those that the exporter has computed this one from; empty: none."""
        sources = self.sources.get(name, ())
        if self.signature.kinds:
            return next((each for each in sources if self.kinds.get(each) == "PARAMETER"), "")
        paths = (each for each in sources if self._is_path(each) and not _EXPORTERS.fullmatch(each))
        return next((each for each in paths if not _is_table(each) and not _RESULTS.fullmatch(each)), "")

    def buffer_source(self, name: str) -> str:
        """A buffer that the exporter has computed a tensor from, and no parameter; empty: none."""
        sources = self.sources.get(name, ())
        if any(self.kinds.get(each) == "PARAMETER" for each in sources):
            return ""
        return next((each for each in sources if self.signature.kinds.get(each) == "BUFFER"), "")

    def made(self, name: str) -> bool:
        """Whether the exporter made a tensor: where it tells of those of the module, it made all others."""
        return bool(_EXPORTERS.fullmatch(name) or (self.kinds and name not in self.kinds))

    def _is_path(self, name: str) -> bool:
        """Whether a name has the form of those of a module's tensors."""
        return bool(_MODULE_PATH.fullmatch(name) or (self.is_torch and _IDENTIFIER.fullmatch(name)))


def _is_table(name: str) -> bool:
    return bool(_TABLES.fullmatch(name.rpartition(".")[2]))


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
    uses = find_uses(nodes, initializers, functions or {})
    exporter = exporter or Exporter()
    return {name: _role(name, uses, exporter) for name in uses.found}


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


def _role(name: str, uses: Uses, exporter: Exporter) -> Role:
    found, tensor = uses.found[name], uses.held[name]
    if tensor is not None and tensor.data_type not in FLOATS:
        return NO_ROLE
    if any(reads(found, _STATISTICS)):
        return Role(Kind.BUFFER, "a running statistic")
    told = exporter.kinds.get(name)
    if told == "PARAMETER":
        return Role(Kind.PARAMETER, "a parameter, as the exporter says")
    if told is not None:
        return Role(Kind.CONSTANT, "a buffer, as the exporter says")
    if all(use.blind for use in found):
        return Role(Kind.CONSTANT, "no gradient reaches it")
    if source := exporter.learned_source(name):
        if tensor is not None and (why := table_like(tensor, exporter.path)):
            return Role(Kind.CONSTANT, why)
        return Role(Kind.PARAMETER, f"computed by the exporter from {source!r}")
    if source := exporter.buffer_source(name):
        return Role(Kind.CONSTANT, f"computed by the exporter from the buffer {source!r}")
    if any(use.is_mask and use.direct and (use.axes is None or use.axes > 1) for use in found):
        learned = tensor is not None and _FOLDED.fullmatch(name) and differs_by_head(tensor, exporter.path)
        return LEARNED if learned else Role(Kind.CONSTANT, "added to attention's scores, as masks are")
    if exporter.names_module(name):
        return _by_name(name, tensor, found, exporter)
    weights = [use for use in reads(found, _WEIGHT_SLOTS) if use.direct or not exporter.made(name)]
    place = f"in the place of a {weights[0].op}'s weight" if weights else "in no weight's place"
    if exporter.made(name):
        completes = any(use.direct and use.completes and use.axes == 1 for use in found)
        if tensor is None:
            return LEFT_OVER
        if not (weights or completes):
            return _folded(name, tensor, found, exporter)
        if why := table_like(tensor, exporter.path):
            return Role(Kind.CONSTANT, why)
        of_module = completes and not weights and _FOLDED.fullmatch(name)
        if (completes or weights[0].op in _NORMS) and not of_module and is_one_number(tensor, exporter.path):
            return Role(Kind.CONSTANT, "one number everywhere, as norms without scale and shift have it")
        return Role(Kind.PARAMETER, place if weights else "scales or shifts a product or a normalisation")
    if weights:
        return Role(Kind.PARAMETER, place)
    learned = name in uses.initializers
    if any(use.axes == 1 or (learned and use.direct) for use in reads(found, _BIAS_SLOTS)) and not _is_scalar(tensor):
        return Role(Kind.PARAMETER, "added or multiplied, as biases and gains are")
    if learned and any(use.direct for use in reads(found, _TOKEN_SLOTS)):
        return Role(Kind.PARAMETER, "joined to the data, as tokens are")
    return Role(Kind.CONSTANT, place)


def _folded(name: str, tensor: onnx.TensorProto, uses: Sequence[Use], exporter: Exporter) -> Role:
    """The role of what the exporter made and no weight's place tells: in a name of TorchScript's stands its reader."""
    reader = _FOLDED.fullmatch(name)
    brought = any(use.direct for slots in (_BIAS_SLOTS, _TOKEN_SLOTS) for use in reads(uses, slots))
    if reader is None or not (brought or reader[1] in ("MatMul", "Gemm")) or not is_irregular(tensor, exporter.path):
        return LEFT_OVER
    return LEARNED


def _by_name(name: str, tensor: onnx.TensorProto | None, uses: Sequence[Use], exporter: Exporter) -> Role:
    """The role of what a module has by name."""
    if any(use.is_basis for use in uses) and not name.endswith("weight"):
        return Role(Kind.CONSTANT, "multiplied to sines and cosines of the product, as random features are")
    if _is_table(name):
        return Role(Kind.CONSTANT, f"called {name.rpartition('.')[2]!r}, as tables are")
    if tensor is not None and (why := table_like(tensor, exporter.path)):
        return Role(Kind.CONSTANT, why)
    return Role(Kind.PARAMETER, "a module's, by its name")


def _is_scalar(tensor: onnx.TensorProto | None) -> bool:
    return tensor is not None and math.prod(tensor.dims) == 1
