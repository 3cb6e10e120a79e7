"""PyTorch's own samples of its ops (`op_db`), each in a module that calls the op, beside what foreplan makes of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import foreplan as fp
from foreplan.frontend.torch.known_tensors import array_of
from foreplan.graph import Graph, Value
from foreplan.ops.evaluate import evaluate
from foreplan.passes.training import without_marks

MOST_ELEMENTS = 60_000  # of a sample
NARROW = (torch.float16, torch.bfloat16)
# Relative to the largest element. Of float64, too, a literal that has only literals beside it is computed in float32.
LIMITS = {np.dtype(np.float64): 1e-7, np.dtype(np.float32): 2e-5, np.dtype(np.float16): 4 * 2.0**-10}
OF_BFLOAT16 = 4 * 2.0**-7
# Results that differ from draw to draw, or mean nothing; test_operators.py compares what draws by its statistics.
DRAWN = frozenset(
    [
        *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "uniform"),
        *("rand_like", "randint", "randint_like", "randn", "randn_like", "svd_lowrank", "pca_lowrank"),
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "bfloat16"),
        *("nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.rrelu"),
        *("nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout"),
        "nn.functional.multi_head_attention_forward",
    ]
)
# Which of equal numbers stands where is chance: these are judged on numbers of which hardly two are equal.
TIED = frozenset(["kthvalue", "topk"])
# Sparse tensors, backward, kernels of one device; and layers that give statistics, of which PyTorch has no gradient.
INNER = (
    *("jiterator", "sparse", "backward", "_scaled_mm", "_flash", "_efficient", "triton"),
    *("native_", "_batch_norm_with"),
)


def name_of(info: Any) -> str:
    """`max.binary`: an op and its variant."""
    return info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")


def is_judged(info: Any) -> bool:
    """Whether an op gives the same from call to call, and is one that modules call."""
    # Views that reach beyond their tensor read another one's storage, which calls here do not have.
    drawn = info.name in DRAWN or "partial_views" in info.variant_test_name
    return not drawn and not any(part in info.name for part in INNER)


def samples(info: Any, dtype: torch.dtype, most: int) -> list[Any]:
    """Some of an op's samples, drawn."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 -- the suite's own source of numbers
    random.seed(0)
    grad = dtype.is_floating_point and info.supports_autograd
    found = [each for each in info.sample_inputs("cpu", dtype, requires_grad=grad) if _is_usable(each)]
    return found if len(found) <= most else random.Random(0).sample(found, most)


def _is_usable(sample: Any) -> bool:
    tensors = [x for x in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    dense = all(x.layout is torch.strided for x in tensors)
    return dense and sum(x.numel() for x in tensors) <= MOST_ELEMENTS and not sample.kwargs.get("dropout_p")


class Calls(nn.Module):
    """An op called with samples. Their tensors of floats are its parameters, others its inputs; numbers stay."""

    def __init__(self, op: Callable[..., Any], given: Sequence[Any]) -> None:
        super().__init__()
        self.op, self.weights, self.trees = op, nn.ParameterList(), []
        self.inputs: list[torch.Tensor] = []
        for sample in given:
            leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
            self.trees.append(([self._kept(x) for x in leaves], spec))

    def _kept(self, x: Any) -> tuple[str, Any]:
        if not isinstance(x, torch.Tensor):
            return "number", x
        if x.is_floating_point():
            self.weights.append(nn.Parameter(x.detach(), requires_grad=x.requires_grad))
            return "weight", len(self.weights) - 1
        self.inputs.append(x)
        return "input", len(self.inputs) - 1

    def forward(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """All results, and a sum of those of floats, each element with a factor of its own."""
        found: dict[str, torch.Tensor] = {}
        loss: Any = 0
        for i, (kept, spec) in enumerate(self.trees):
            leaves = [
                self.weights[x] * 1 if kind == "weight" else inputs[x].clone() if kind == "input" else x
                for kind, x in kept
            ]
            first, args, kwargs = pytree.tree_unflatten(leaves, spec)
            for j, y in enumerate(pytree.tree_leaves(self.op(first, *args, **kwargs))):
                if isinstance(y, torch.Tensor):
                    y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
                    found[f"y{i}_{j}"] = y
                    if y.dtype in NARROW:
                        y = y.double()  # so that the sum is as good as they are
                    if y.is_floating_point() and y.numel():
                        factors = torch.cos(torch.arange(y.numel(), dtype=torch.float64) + 1)
                        loss = loss + (y * factors.reshape(y.shape).to(y.dtype)).sum()
        return found | ({"loss": loss} if isinstance(loss, torch.Tensor) else {})


def faults(info: Any, given: Sequence[Any]) -> Iterator[str]:
    """What differs from PyTorch: values, and in float64 gradients of the sum.

    Raises:
        ForeplanError: the op, or one of the samples, is refused.
    """
    module = Calls(lambda *args, **kwargs: info.op(*args, **kwargs), given)
    theirs = copy.deepcopy(module)
    want = theirs(*copy.deepcopy(module.inputs))
    graph = fp.from_torch(module, *copy.deepcopy(module.inputs))
    forward = without_marks(graph)
    found = _computed(forward, module.inputs)
    exact = None
    is_wide = all(weight.dtype == torch.float64 for weight in module.weights)
    for name, y in want.items():
        if name == "loss" and not (is_wide and y.dtype == torch.float64):
            continue  # each of its terms is judged
        got, wanted = found[forward.outputs[name]], array_of(y.resolve_neg())
        if problem := differs(got, wanted):
            exact = _in_float32(info, given) if exact is None else exact
            if name not in exact or not _is_as_close(got, wanted, exact[name]):
                yield f"{name}: {problem}"
    loss = want.get("loss")
    is_exact = loss is not None and loss.dtype == torch.float64 and is_wide
    if loss is None or not loss.requires_grad or torch.isnan(loss) or not is_exact:
        return  # of float32, PyTorch's own gradients are off by as much: a row of one element has none
    loss.backward()
    if not graph.parameters:
        if any(p.grad is not None and p.grad.any() for p in theirs.parameters()):
            yield "no parameter is trained"
        return
    try:
        step = fp.differentiate(graph, eval(f"lambda {', '.join(graph.outputs)}: loss"))
    except fp.ModelError as error:
        if "depends on no parameter" not in str(error):
            raise
        step = graph
    found = _computed(step, module.inputs) if step.gradients else {}
    # PyTorch rounds what goes back through a float16; gradients stay wide here until they are compared.
    rounded = any(y.dtype == torch.float16 for y in want.values())
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            zero = torch.zeros_like(parameter)
            grad = array_of(zero if parameter.grad is None else parameter.grad + zero)
            got = found[step.gradients[name]] if name in step.gradients else np.zeros_like(grad)
            got = got.astype(np.float16).astype(got.dtype) if rounded else got
            if problem := differs(got, grad):
                yield f"gradient of {name}: {problem}"


def _in_float32(info: Any, given: Sequence[Any]) -> dict[str, np.ndarray]:
    """What PyTorch gives of narrow samples in float32, of which its own narrow results may be far: it rounds places,
    and each of many sums. Nothing, of samples that are not narrow, or where it has no such op.
    """

    def widened(x: Any) -> Any:
        return x.float() if isinstance(x, torch.Tensor) and x.dtype in NARROW else x

    if not any(x.dtype in NARROW for sample in given for x in pytree.tree_leaves(sample.input) if hasattr(x, "dtype")):
        return {}
    samples = [copy.copy(sample) for sample in given]
    for sample in samples:
        sample.input, sample.args, sample.kwargs = pytree.tree_map(widened, (sample.input, sample.args, sample.kwargs))
    module = Calls(lambda *args, **kwargs: info.op(*args, **kwargs), samples)
    try:
        made = module(*copy.deepcopy(module.inputs))
    except RuntimeError:
        return {}
    return {name: array_of(y) for name, y in made.items() if y.is_floating_point()}


def _is_as_close(found: np.ndarray, want: np.ndarray, exact: np.ndarray) -> bool:
    """Whether what was found is as close to a result of float32 as what PyTorch gives."""
    if not found.shape == want.shape == exact.shape or found.dtype != want.dtype:
        return False
    kind = found.dtype
    found, want, exact = (x.astype(np.float64) for x in (found, want, exact))
    finite = np.isfinite(exact)
    ours, theirs = (np.abs(np.where(finite, x - np.where(finite, exact, 0), 0)).max(initial=0) for x in (found, want))
    scale = max(1.0, np.abs(exact[finite]).max(initial=0))
    allowed = theirs if np.isfinite(theirs) else np.inf
    return bool(ours <= max(LIMITS.get(kind, OF_BFLOAT16) * scale, allowed))  # a NaN of ours is not


def _computed(graph: Graph, inputs: Sequence[torch.Tensor]) -> Mapping[Value, np.ndarray]:
    known = {value: x.numpy() for value, x in zip(graph.inputs, inputs, strict=True)}
    for value in graph.stored:
        assert value.init is not None
        known[value] = np.empty(value.shape, value.dtype.numpy)
        value.init.fill(known[value], np.random.default_rng(0))
    assert evaluate(graph.nodes, known, 1 << 32)
    return known


def differs(found: np.ndarray, want: np.ndarray) -> str:
    """How two arrays differ; nothing where they agree as far as their element type goes."""
    if found.shape != want.shape or found.dtype != want.dtype:
        return f"{found.dtype}{list(found.shape)} in the place of {want.dtype}{list(want.shape)}"
    is_float = want.dtype.kind == "f" or want.dtype.name == "bfloat16"
    if not is_float:
        return "" if (found == want).all() else f"{found.ravel()[:5]} in the place of {want.ravel()[:5]}"
    limit = LIMITS.get(want.dtype, OF_BFLOAT16)
    found, want = (x.astype(np.float64) for x in (found, want))
    special = ~np.isfinite(want)
    if not np.array_equal(found[special], want[special], equal_nan=True) or not np.isfinite(found[~special]).all():
        return "infinities or NaNs in other places"
    scale = max(1.0, np.abs(want[~special]).max(initial=0))
    off = np.abs(found[~special] - want[~special]).max(initial=0) / scale
    return "" if off <= limit else f"off by {off:.1e} of the largest element"
