"""One form of a module, op by op: PyTorch's graph becomes nodes of a graph in the making."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.errors import ForeplanError, ShapeError, UnsupportedError
from foreplan.frontend.torch.call import Call, Source, dtype_of
from foreplan.frontend.torch.known import MOST_KNOWN, array_of
from foreplan.frontend.torch.pairs import Pair, handle, is_complex
from foreplan.frontend.torch.places import Places
from foreplan.frontend.torch.table import Entry, entry
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.ops.marks import StopGradient

if TYPE_CHECKING:
    import torch

# What `torch.autocast` computes in the narrow type, and what in float32: PyTorch's own lists (docs, "Autocast Op
# Reference"), as far as these ops have entries. Everything else takes the types that it is given.
_CAST = frozenset(
    [
        "linear",
        "matmul",
        "bmm",
        "mm",
        "mv",
        "addmm",
        "baddbmm",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "scaled_dot_product_attention",
        "prelu",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "einsum",
        "softmax",
        "log_softmax",
        "layer_norm",
        "group_norm",
        "norm",
        "cumsum",
        "cumprod",
        "sum",
        "prod",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "pow",
        "rsqrt",
        "reciprocal",
        "softplus",
        "cross_entropy_loss",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "cdist",
        "renorm",
        "erfinv",
        "binary_cross_entropy_with_logits",
        "kl_div",
    ]
)
_CHECKS = ("_assert", "_check", "sym_constrain", "sym_size", "sym_numel", "sym_stride", "_functional_assert")


_PLACES = ("device", "pin_memory", "layout", "out")  # where a result lies, which is nothing to a graph


def op_name(target: Any) -> str:
    """An op as the table calls it: ATen's by their own names, others with that of their library."""
    library, _, name = target._schema.name.partition("::")
    return name if library == "aten" else f"{library}::{name}"


class Run:
    """One pass over the nodes of a program.

    Args:
        reader: has the stored tensors and the graph in the making.
        training: whether the program is that of training mode.
    """

    def __init__(self, reader: Source, training: bool) -> None:
        self.reader, self.training = reader, training
        self.places = Places()
        self._autocast: Any = None

    def graph(self, graph: torch.fx.Graph, owner: Any) -> list[Any]:
        """All nodes of a graph, whose placeholders have their content already; the outputs."""
        import torch

        for node in graph.nodes:
            if node.op == "get_attr":
                self.places[node] = _attribute(owner, node.target)
            elif node.op == "call_function":
                self.places[node] = self._node(node)
            elif node.op == "output":
                (given,) = node.args
                listed = list(given) if isinstance(given, tuple | list) else [given]
                return [self.places[each] if isinstance(each, torch.fx.Node) else each for each in listed]
        return []

    def _node(self, node: torch.fx.Node) -> Any:
        path, line = _path(node), _line(node)
        self.reader.tracer.place(path, line)
        try:
            return self._result(node)
        except ForeplanError as error:
            if "ATen op" in str(error):
                raise
            name = getattr(node.target, "__name__", str(node.target))
            where = f"{path or 'the module itself'}{line and ', '}{line}"
            kind = type(error) if isinstance(error, UnsupportedError | ShapeError) else UnsupportedError
            raise kind(f"ATen op {name} ({where}): {error}") from error

    def _result(self, node: torch.fx.Node) -> Any:
        import torch
        from torch.utils import _pytree as pytree

        args, kwargs = pytree.tree_map_only(torch.fx.Node, lambda each: self.places[each], (node.args, node.kwargs))
        target: Any = node.target
        if target is operator.getitem:
            found = args[0][args[1]]
            whole = node.args[0]
            if isinstance(whole, torch.fx.Node):
                self._view_of_piece(node, whole, args[1])
            return found
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._higher_order(node, target.name(), list(args))
        if not isinstance(target, torch._ops.OpOverload):
            return target(*args, **kwargs)  # Python's own functions of sizes
        name = op_name(target)
        if name.startswith(_CHECKS):
            return None
        written = _places(node)
        known = entry(name)
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor | torch.Tensor | Pair)]
        is_known = not any(isinstance(x, Tensor | Pair) for x in leaves)
        if is_known and not (known is not None and known.draws) and self._may_fold(node, leaves):
            for each in leaves:
                self.reader.fold(each)
            return self._folded(node, target, args, kwargs, known)
        if is_complex(leaves, node.meta.get("val")):
            call = Call(self.reader, name, node.meta.get("val"), self.training)
            given, named = self._arguments(name, args, {k: v for k, v in kwargs.items() if k not in _PLACES}, None)
            return handle(call, known, given, named)
        if known is None:
            raise UnsupportedError("foreplan has no such op; write this line with others")
        return self._traced(node, target, name, known, args, kwargs, written)

    # What is known while importing.

    def _may_fold(self, node: torch.fx.Node, leaves: Sequence[Any]) -> bool:
        import torch
        from torch.utils import _pytree as pytree

        made = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
        stored = any(self.reader.is_stored(x) for x in leaves)
        return not stored and all(x.numel() <= MOST_KNOWN for x in made)

    def _folded(self, node: torch.fx.Node, target: Any, args: Any, kwargs: Any, known: Entry | None) -> Any:
        import torch

        more = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        with torch.no_grad():
            result = target(*args, **more)
        if known is not None and known.views:
            self._view(node, target, known, args, kwargs)
        return result

    # What becomes nodes.

    def _traced(
        self,
        node: torch.fx.Node,
        target: Any,
        name: str,
        known: Entry,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        written: Sequence[Any],
    ) -> Any:
        place = written[0] if written else None
        kwargs = {key: value for key, value in kwargs.items() if key not in _PLACES}
        call = Call(self.reader, name, node.meta.get("val"), self.training)
        result = self._called(call, known, args, kwargs)
        for at, new in call.written.items():
            self.places.write(node.args[at], new)
        if place is not None:
            self.places.write(place, result)
            self.places.alias(node, place, tuple(node.meta["val"].shape))
            return self.places[place]
        if known.views:
            self._view(node, target, known, args, kwargs)
        return result

    def _called(self, call: Call, known: Entry, args: Sequence[Any], kwargs: Any) -> Any:
        """The result of a handler, as PyTorch has it: in its shapes and element types."""
        given, named = self._arguments(call.name.removesuffix("_"), args, kwargs, call.result)
        result = known.handler(call, *given, **named)
        if isinstance(result, tuple | list):
            return [self._checked(each, like) for each, like in zip(result, call.result)]
        return self._checked(result, call.result)

    def _checked(self, result: Any, like: Any) -> Any:
        import torch

        if not isinstance(like, torch.Tensor) or result is None:
            return result
        found, dtype = as_tensor(result), dtype_of(like.dtype)
        if found.shape != tuple(like.shape):
            raise ShapeError(f"foreplan gives {list(found.shape)}, where PyTorch gives {list(like.shape)}")
        return convert(found, dtype)

    def _arguments(self, name: str, args: Sequence[Any], kwargs: Any, meta: Any) -> Any:
        """Arguments as handlers take them: known tensors are arrays, those that are stored are tensors."""
        import torch
        from torch.utils import _pytree as pytree

        given, named = pytree.tree_map_only(torch.Tensor, self._as_argument, (list(args), dict(kwargs)))
        if self._autocast is None or name not in _CAST:
            return given, named
        wanted = next((x.dtype for x in pytree.tree_leaves(meta) if isinstance(x, torch.Tensor)), None)
        if wanted is None or not wanted.is_floating_point:
            return given, named
        dtype = dtype_of(wanted)

        def cast(x: Any) -> Any:
            return convert(x, dtype) if isinstance(x, Tensor) and x.value.dtype.is_float else x

        return pytree.tree_map_only(Tensor, cast, (given, named))

    def _as_argument(self, tensor: Any) -> Any:
        stored = self.reader.stored_tensor(tensor)
        return array_of(tensor) if stored is None else stored

    # Views.

    def _view(self, node: torch.fx.Node, target: Any, known: Entry, args: Sequence[Any], kwargs: Any) -> None:
        import torch

        of = node.args[0]
        if not isinstance(of, torch.fx.Node):
            return
        path, line, meta = _path(node), _line(node), node.meta.get("val")
        name, rest = op_name(target), list(args[1:])
        more = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "layout")}

        def replay(content: Any) -> Any:
            if isinstance(content, torch.Tensor):
                return target(content, *rest, **more)
            self.reader.tracer.place(path, line)
            return self._called(Call(self.reader, name, meta, self.training), known, [content, *rest], more)

        shape = tuple(of.meta["val"].shape) if isinstance(of.meta.get("val"), torch.Tensor) else ()
        self.places.view(node, of, shape, replay, lambda content: target(content, *rest, **more))

    def _view_of_piece(self, node: torch.fx.Node, whole: torch.fx.Node, at: Any) -> None:
        """One of the pieces that a split gives: its views go on from there."""
        import torch

        of, made = whole.args[0] if whole.args else None, self.places._views.get(whole)
        if made is None or not isinstance(of, torch.fx.Node):
            return
        self.places.view(
            node, of, made.shape, lambda content: made.replay(content)[at], lambda content: made.known(content)[at]
        )

    # Regions.

    def _higher_order(self, node: torch.fx.Node, name: str, args: list[Any]) -> Any:
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *given = args
            results = self._region(node, body, given, stopped=not enabled)
            return results if enabled else [self.stopped(each) for each in results]
        if name == "wrap_with_autocast":
            _, dtype, enabled, _, body, *given = args
            before, self._autocast = self._autocast, dtype if enabled else None
            try:
                return self._region(node, body, given)
            finally:
                self._autocast = before
        if name == "cond":
            return self._cond(node, *args)
        raise UnsupportedError(f"the region {name!r} of PyTorch's graph is not known")

    def _region(self, node: torch.fx.Node, body: Any, given: Sequence[Any], stopped: bool = False) -> list[Any]:
        """A graph within the graph. What it writes into its arguments is written outside."""
        import torch

        outside = [each for each in node.args if not (isinstance(each, torch.fx.Node) and each.op == "get_attr")]
        outside = outside[len(outside) - len(given) :]
        results = self._region_of(body, given)
        holders = [each for each in body.graph.nodes if each.op == "placeholder"]
        for holder, content, place in zip(holders, given, outside):
            if self.places[holder] is not content and isinstance(place, torch.fx.Node):
                new = self.places[holder]
                self.places.write(place, self.stopped(new) if stopped else new)
        return results

    def _cond(self, node: torch.fx.Node, condition: Any, yes: Any, no: Any, given: Sequence[Any]) -> list[Any]:
        """Both branches, of whose results one is taken; a condition that is known takes it at once."""
        import torch

        if not isinstance(condition, Tensor):
            return self._region_of(yes if bool(condition) else no, given)
        pairs = zip(self._region_of(yes, given), self._region_of(no, given))
        flag = condition.reshape(())
        made = [x for x in node.meta.get("val", ()) if isinstance(x, torch.Tensor)]
        return [self._checked(np.where(flag, as_tensor(a), as_tensor(b)), like) for (a, b), like in zip(pairs, made)]

    def _region_of(self, body: Any, given: Sequence[Any]) -> list[Any]:
        holders = [each for each in body.graph.nodes if each.op == "placeholder"]
        for holder, content in zip(holders, given, strict=True):
            self.places[holder] = content
        return self.graph(body.graph, body)

    def stopped(self, x: Any) -> Any:
        """A result of which no gradient comes back."""
        if isinstance(x, Tensor) and x.value.dtype.is_float:
            return self.reader.tracer.wrap(self.reader.tracer.at().apply(StopGradient(), x.value))
        return x


def _attribute(owner: Any, path: str) -> Any:
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


def _places(node: torch.fx.Node) -> list[Any]:
    """The arguments that an op writes, as the node has them."""
    target: Any = node.target
    arguments = enumerate(target._schema.arguments)
    written = [(i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in written]


def _path(node: torch.fx.Node) -> str:
    """The module that a node is in, as `named_modules` calls it."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return next((re.sub(r"@\d+", "", path) for path, _ in reversed(stack) if path), "")


def _line(node: torch.fx.Node) -> str:
    """`file.py:12` of the user's innermost line."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{found[-1][0].rpartition('/')[2]}:{found[-1][1]}" if found else ""


def writes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes whose tensors are written in place, themselves or through a view, as far as a graph shows."""
    import torch

    found: set[torch.fx.Node] = set()
    sources: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
            sources[node] = node.args[0]
        elif isinstance(node.target, torch._ops.OpOverload):
            name = op_name(node.target)
            known = entry(name)
            places = _places(node)
            seen = places or (node.args[:1] if known is not None and known.views else ())
            sources.update((node, each) for each in seen[:1] if isinstance(each, torch.fx.Node))
            if name in ("batch_norm", "instance_norm"):
                places += [each for each in node.args[3:5] if each is not None]
            found.update(each for each in places if isinstance(each, torch.fx.Node))
        else:
            found.update(_written_within(node))
    for node in list(found):
        while node in sources:
            node = sources[node]
            found.add(node)
    return found


def _written_within(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """What a region writes of its arguments."""
    import torch

    for each in node.args:
        if isinstance(each, torch.fx.Node) and each.op == "get_attr":
            body = _attribute(node.graph.owning_module, each.target)
            if not hasattr(body, "graph"):
                continue
            inner = writes(body.graph)
            holders = [holder for holder in body.graph.nodes if holder.op == "placeholder"]
            given = [other for other in node.args if isinstance(other, torch.fx.Node) and other.op != "get_attr"]
            yield from (place for holder, place in zip(holders, given[len(given) - len(holders) :]) if holder in inner)
