"""What a file says of its tensors besides their content: its exporter's record of the module, and their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foreplan.frontend.onnx.module.signature import Signature

if TYPE_CHECKING:
    from pathlib import Path

    import onnx

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
# What modules call single numbers that they learn, TensorFlow any variable, and Paddle weights and biases.
_LEARNED = re.compile(
    r"(.*_)?(weight|bias|kernel|gamma|beta|alpha|scale|slope|gain|shift|temperature|temp|tau|logit_\w+|lambda\w*"
    r"|rezero\w*|[wb]_\d+)(:\d+)?|.*\bReadVariableOp\b.*"
)
_ALWAYS_LEARNED = re.compile(r".*(logit_(scale|bias)|temperature|rezero\w*|resweight\w*|layer_?scale\w*)(:\d+)?")
_DIVISORS = re.compile(r"(.*_)?(temperature|temp|tau|scale)(:\d+)?|.*\bReadVariableOp\b.*")
# What converters call numbers that stood in the program, such as Paddle's `p2o.helper.constant.12`.
_LITERALS = re.compile(r"(.*[./_])?(const(ant)?s?|literals?|eps(ilon)?)([./_@:]?\d+)*")
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_SOURCES = "pkg.onnxscript.optimizer.folded_from"


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
        return Exporter("pytorch" in str(proto.producer_name).lower(), signature, kinds, sources, path)

    def names_module(self, name: str) -> bool:
        """Whether a PyTorch module calls a tensor by this name."""
        return self._is_path(name) and not self.made(name)

    def tells(self, name: str) -> bool:
        """Whether a PyTorch module has a tensor of this name for certain: other tools write names with dots as well."""
        return self.is_torch and self.names_module(name)

    def learned_source(self, name: str) -> str:
        """A tensor that training would change, of those that the exporter has computed this one from; empty: none."""
        sources = self.sources.get(name, ())
        if self.signature.kinds:
            return next((each for each in sources if self.kinds.get(each) == "PARAMETER"), "")
        paths = (each for each in sources if self._is_path(each) and not _EXPORTERS.fullmatch(each))
        return next((each for each in paths if not is_table_name(each) and not _RESULTS.fullmatch(each)), "")

    def buffer_source(self, name: str) -> str:
        """A buffer that the exporter has computed a tensor from, and no parameter; empty: none."""
        sources = self.sources.get(name, ())
        if any(self.kinds.get(each) == "PARAMETER" for each in sources):
            return ""
        return next((each for each in sources if self.signature.kinds.get(each) == "BUFFER"), "")

    def made(self, name: str) -> bool:
        """Whether the exporter made a tensor: where it tells of those of the module, it made all others."""
        return bool(_EXPORTERS.fullmatch(name) or (self.kinds and name not in self.kinds))

    def folded_by(self, name: str) -> str:
        """The op that reads what TorchScript's exporter computed from a tensor of the module; empty: it did not."""
        found = _FOLDED.fullmatch(name)
        return found[1] if found else ""

    def _is_path(self, name: str) -> bool:
        """Whether a name has the form of those of a module's tensors."""
        return bool(_MODULE_PATH.fullmatch(name) or (self.is_torch and _IDENTIFIER.fullmatch(name)))


def is_learned_name(name: str, divides: bool = False) -> bool:
    """Whether the last part of a name means a number that is learned, or one that is learned as a divisor."""
    return bool((_DIVISORS if divides else _LEARNED).fullmatch(re.split(r"[./](?!ReadVariableOp|resource)", name)[-1]))


def is_sure_name(name: str) -> bool:
    """Whether a name means a learned number wherever it stands."""
    return bool(_ALWAYS_LEARNED.fullmatch(name))


def is_literal_name(name: str) -> bool:
    """Whether a name means a number that stood in the program."""
    return bool(_LITERALS.fullmatch(name))


def is_table_name(name: str) -> bool:
    """Whether the last part of a name is what modules give to what they compute once and do not train."""
    return bool(_TABLES.fullmatch(name.rpartition(".")[2]))
