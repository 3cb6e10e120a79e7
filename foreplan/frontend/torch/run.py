"""One form of a module, op by op: PyTorch's graph becomes nodes of a graph in the making."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.base.errors import ForeplanError, ShapeError, UnsupportedError
from foreplan.frontend.torch.autocast import cast
from foreplan.frontend.torch.call import Call, Source, dtype_of
from foreplan.frontend.torch.checkpoints import mark_of
from foreplan.frontend.torch.decompositions import decomposed
from foreplan.frontend.torch.export_gaps import HOOKED
from foreplan.frontend.torch.frames import line_of
from foreplan.frontend.torch.functions import COTANGENT
from foreplan.frontend.torch.known_tensors import MOST_KNOWN, Sizes, array_of
from foreplan.frontend.torch.ops.gradients import hooked
from foreplan.frontend.torch.pairs import Pair, handle, is_complex
from foreplan.frontend.torch.places import Places
from foreplan.frontend.torch.table import Entry, entry
from foreplan.frontend.torch.writes import attribute, op_name, written_by
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.graph import Node
from foreplan.ops.marks import StopGradient

if TYPE_CHECKING:
    import torch

_CHECKS = ("_assert", "_check", "sym_constrain", "sym_stride", "_functional_assert", "_linalg_check_errors")
_SIZES = ("sym_size", "sym_numel")  # of what is known now, though PyTorch did not know it yet


_NO_USES = (f"{COTANGENT.replace('::', '.')}.default",)
_OF_DATA = "its shape depends on data, and shapes are fixed when a step is compiled"
_PLACES = ("device", "pin_memory", "layout", "out")  # where a result lies, which is nothing to a graph


class Run:
    """One pass over the nodes of a program.

    Args:
        reader: has the stored tensors and the graph in the making.
        training: whether the program is that of training mode.
    """

    def __init__(self, reader: Source, training: bool) -> None:
        self.reader, self.training = reader, training
        self.places = Places()
        self.checkpointed: dict[int, list[Node]] = {}  # the nodes of each call that is recomputed
        self._autocast: Any = None
        self._stopped = False  # whether no gradient is recorded
        self._quiet: set[torch.fx.Node] = set()  # what was made meanwhile, and is read afterwards
        self._sizes = Sizes()
        self._within: tuple[str, str] | None = None  # module and line of an op that is read as other ops
        self._pieces: dict[torch.fx.Node, list[Any]] = {}  # of such an op with several results: the nodes of these

    def graph(self, graph: torch.fx.Graph, owner: Any) -> list[Any]:
        """All nodes of a graph, whose placeholders have their content already; the outputs."""
        import torch

        for node in graph.nodes:
            if node.op == "get_attr":
                self.places[node] = attribute(owner, node.target)
            elif node.op == "call_function":
                self.places[node] = self._node(node)
            elif node.op == "output":
                (given,) = node.args
                listed = list(given) if isinstance(given, tuple | list) else [given]
                return [self.places[each] if isinstance(each, torch.fx.Node) else each for each in listed]
        return []

    def _node(self, node: torch.fx.Node) -> Any:
        path, line = self._place(node)
        self.reader.tracer.place(path, line)
        nodes = self.reader.tracer.at().nodes
        count, mark = len(nodes), mark_of(node) if self.training else None
        try:
            result = self._result(node)
            if mark is not None:
                self.checkpointed.setdefault(mark, []).extend(nodes[count:])
            return result
        except ForeplanError as error:
            if "ATen op" in str(error):
                raise
            name = getattr(node.target, "__name__", str(node.target))
            if self._within is not None:
                raise UnsupportedError(f"of its parts, {name}: {error}") from error
            where = f"{path or 'the module itself'}{line and ', '}{line}"
            raise UnsupportedError(f"ATen op {name} ({where}): {error}") from error

    def _place(self, node: torch.fx.Node) -> tuple[str, str]:
        """The module and the line that a node belongs to."""
        return self._within or (path_of(node), line_of(node))

    def _result(self, node: torch.fx.Node) -> Any:
        import torch
        from torch.utils import _pytree as pytree

        args, kwargs = pytree.tree_map_only(torch.fx.Node, lambda each: self.places[each], (node.args, node.kwargs))
        target: Any = node.target
        if target is operator.getitem:
            found = args[0][args[1]]
            whole = node.args[0]
            if isinstance(found, ShapeError) and node.users:
                raise found
            if found is None and not all(map(_is_check, node.users)) and node.meta.get("val") is not None:
                raise UnsupportedError(f"the result at place {args[1]} of this op; foreplan gives the first alone")
            if isinstance(whole, torch.fx.Node):
                self._view_of_piece(node, whole, args[1])
            return found
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._higher_order(node, target.name(), list(args))
        if not isinstance(target, torch._ops.OpOverload):
            if getattr(target, "__module__", "").startswith("torch._functorch"):
                raise UnsupportedError(
                    "a transform of torch.func, such as vmap; write the axis of items, or the gradient, out"
                )
            try:
                return target(*args, **kwargs)  # Python's own functions of sizes
            except Exception as error:
                raise UnsupportedError("a number that depends on data; keep it a tensor") from error
        name = op_name(target)
        if name in _SIZES:
            shape = args[0].shape
            return shape[args[1]] if len(args) > 1 else math.prod(shape)
        if _is_check(node):
            return None
        if name == HOOKED:
            return self._hooked(node, *args)
        if name == "as_strided" and not node.args[0].meta["val"].is_contiguous():
            raise UnsupportedError("as_strided of a tensor that is not contiguous; call contiguous() before it")
        known = entry(name)
        # `squeeze_` and its like write no element: they give another view.
        written = [] if known is not None and known.views else written_by(node)
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor | torch.Tensor | Pair)]
        is_known = not any(isinstance(x, Tensor | Pair) for x in leaves)
        if is_known and not (known is not None and known.draws) and self._may_fold(node, leaves):
            for each in leaves:
                self.reader.fold(each)
            return self._folded(node, target, args, kwargs, known)
        kwargs = {key: value for key, value in kwargs.items() if key not in _PLACES}
        call = Call(self.reader, name, self._sizes.of(node.meta.get("val")), self.training)
        try:
            result = self._called(call, known, args, kwargs)
        except UnsupportedError as error:
            return self._opened(node, target, error)
        for at, new in call.written.items():
            self.places.write(node.args[at], new, self._stopped)
        if written:
            self.places.write(written[0], result, self._stopped)
            self.places.alias(node, written[0], tuple(node.meta["val"].shape))
            return self.places[written[0]]
        if known is not None and known.views:
            self._view(node, target, known, args, kwargs)
        return result

    # What is known while importing.

    def _may_fold(self, node: torch.fx.Node, leaves: Sequence[Any]) -> bool:
        import torch
        from torch.utils import _pytree as pytree

        made = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
        stored = any(self.reader.is_stored(x) for x in leaves)
        counts = (math.prod(n for n in x.shape if isinstance(n, int)) for x in made)
        return not stored and all(count <= MOST_KNOWN for count in counts)

    def _folded(self, node: torch.fx.Node, target: Any, args: Any, kwargs: Any, known: Entry | None) -> Any:
        import torch

        more = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        with torch.no_grad():
            result = target(*args, **more)
        if known is not None and known.views:
            self._view(node, target, known, args, kwargs)
        if isinstance(result, torch.Tensor):
            self._sizes.learn(result.shape, node.meta.get("val"))
        return result

    def _hooked(self, node: torch.fx.Node, x: Any, cotangent: Tensor, gradient: Any) -> None:
        """From here on, a tensor has the gradient that a hook makes of its own."""
        of: Any = node.args[0]
        used = [user for user in of.users if user in self.places.content and str(user.target) not in _NO_USES]
        if used:
            raise UnsupportedError(
                f"a hook is registered on a tensor after {used[0].target} has read it; register it before that"
            )
        self.places.hook(of, hooked(Call(self.reader, "hooked", None, self.training), x, cotangent, gradient))

    # What becomes nodes.

    def _called(self, call: Call, known: Entry | None, args: Sequence[Any], kwargs: Any) -> Any:
        """The result of a handler, as PyTorch has it: in its shapes and element types."""
        import torch
        from torch.utils import _pytree as pytree

        given, named = self._arguments(call.name.removesuffix("_"), args, kwargs, call.result)
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor | torch.Tensor | Pair)]
        try:
            if is_complex(leaves, call.result):
                return handle(call, known, given, named)
            return self._handled(call, known, given, named)
        except ForeplanError:
            raise
        except Exception as error:  # a form of the op that its handler does not have
            if "data-dependent" in str(error):
                raise UnsupportedError(_OF_DATA) from error
            reason = f"foreplan does not know this op with these arguments ({type(error).__name__}: {error})"
            raise UnsupportedError(reason) from error

    def _handled(self, call: Call, known: Entry | None, args: list[Any], kwargs: dict[str, Any]) -> Any:
        import torch

        if known is None:
            raise UnsupportedError("foreplan has no such op; write this line with others")
        single = not isinstance(call.result, list | tuple)
        made = [x for x in ([call.result] if single else call.result) if isinstance(x, torch.Tensor)]
        is_static = all(isinstance(n, int) for x in made for n in x.shape)
        if made and is_static and not any(x.numel() for x in made):
            empty = [np.empty(x.shape, dtype_of(x.dtype).numpy) for x in made]
            result: Any = empty[0] if single else empty
        elif known.along and args and isinstance(args[0], Tensor) and not args[0].ndim:
            return self._as_row(call, known, args, kwargs)
        else:
            result = known.handler(call, *args, **kwargs)
        if not is_static and single:
            result = as_tensor(result)
            self._sizes.learn(result.shape, call.result)
            call = replace(call, result=self._sizes.of(call.result))
        elif not is_static:
            raise UnsupportedError(_OF_DATA)
        if isinstance(result, tuple | list):
            return [self._checked_or_off(each, like) for each, like in zip(result, call.result)]
        return self._checked(result, call.result)

    def _checked_or_off(self, result: Any, like: Any) -> Any:
        """One of several results, or how it is off: that counts where somebody reads it. PyTorch 2.9 describes the last
        states of an LSTM with an axis too many.
        """
        try:
            return self._checked(result, like)
        except ShapeError as error:
            return error

    def _as_row(self, call: Call, known: Entry, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What an op along an axis gives of numbers: they are rows of one, and so is each result."""

        def row(x: Any) -> Any:
            return x.reshape(1) if isinstance(x, Tensor | np.ndarray) and not x.ndim else x

        single = not isinstance(call.result, list | tuple)
        made = [call.result] if single else call.result
        rows: Any = [None if each is None else each.reshape(1) for each in made]
        like = rows[0] if single else rows
        found = known.handler(replace(call, result=like), *map(row, args), **{k: row(v) for k, v in kwargs.items()})
        results = [
            each if each is None else self._checked(as_tensor(each).reshape(()), like)
            for each, like in zip([found] if single else found, made)
        ]
        return results[0] if single else results

    def _checked(self, result: Any, like: Any) -> Any:
        import torch

        if not isinstance(like, torch.Tensor) or result is None:
            return result
        dtype = dtype_of(like.dtype)
        found = as_tensor(result, dtype)
        if not all(isinstance(n, int) for n in like.shape):
            raise UnsupportedError(_OF_DATA)
        if found.shape != tuple(like.shape):
            raise ShapeError(f"foreplan gives {list(found.shape)}, where PyTorch gives {list(like.shape)}")
        return convert(found, dtype)

    def _arguments(self, name: str, args: Sequence[Any], kwargs: Any, meta: Any) -> Any:
        """Arguments as handlers take them: known tensors are arrays, those that are stored are tensors."""
        import torch
        from torch.utils import _pytree as pytree

        given = pytree.tree_map_only(torch.Tensor, self._as_argument, (list(args), dict(kwargs)))
        return given if self._autocast is None else cast(name, given, meta)

    def _as_argument(self, tensor: Any) -> Any:
        stored = self.reader.stored_tensor(tensor)
        return array_of(tensor) if stored is None else stored

    # What PyTorch says with other ops.

    def _opened(self, node: torch.fx.Node, target: Any, reason: UnsupportedError) -> Any:
        import torch
        from torch.utils import _pytree as pytree

        given, spec = pytree.tree_flatten((node.args, node.kwargs))
        body = decomposed(target, [x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in given], spec)
        if body is None:
            raise reason
        outside = [x for x in given if isinstance(x, torch.fx.Node) and isinstance(x.meta["val"], torch.Tensor)]
        holders = [each for each in body.graph.nodes if each.op == "placeholder"]
        for holder, place in zip(holders, outside, strict=True):
            self.places[holder] = self.places[place]
            self.places.alias(holder, place, tuple(place.meta["val"].shape))
        before, self._within = self._within, self._place(node)
        try:
            results = self.graph(body.graph, body)
        finally:
            self._within = before
        (made,) = next(iter(reversed(body.graph.nodes))).args
        if isinstance(made, torch.fx.Node) and isinstance(results[0], tuple):  # the names of several results
            made, results = made.args, list(results[0])
        if isinstance(made, torch.fx.Node):
            self.places.alias(node, made, tuple(made.meta["val"].shape))
            return results[0]
        self._pieces[node] = list(made)
        return results

    # Views.

    def _view(self, node: torch.fx.Node, target: Any, known: Entry, args: Sequence[Any], kwargs: Any) -> None:
        import torch

        of = node.args[0]
        if not isinstance(of, torch.fx.Node):
            return
        (path, line), meta = self._place(node), node.meta.get("val")
        name, rest = op_name(target), list(args[1:])
        more = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "layout")}

        def replay(content: Any) -> Any:
            if isinstance(content, torch.Tensor):
                return target(content.detach(), *rest, **more)
            self.reader.tracer.place(path, line)
            call = Call(self.reader, name, self._sizes.of(meta), self.training)
            return self._called(call, known, [content, *rest], more)

        shape = tuple(of.meta["val"].shape) if isinstance(of.meta.get("val"), torch.Tensor) else ()
        known_replay = lambda content: target(content, *rest, **more)  # noqa: E731
        self.places.view(node, of, shape, replay, known_replay, stops=name in ("detach", "detach_"))

    def _view_of_piece(self, node: torch.fx.Node, whole: torch.fx.Node, at: Any) -> None:
        """One of the pieces that a split gives: its views go on from there."""
        import torch

        if whole in self._pieces:
            piece = self._pieces[whole][at]
            if piece in self._quiet:
                shape = tuple(piece.meta["val"].shape)
                self.places.view(node, piece, shape, self.stopped, lambda content: content, stops=True)
            elif isinstance(piece, torch.fx.Node):
                self.places.alias(node, piece, tuple(piece.meta["val"].shape))
            return
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
            before, self._stopped = self._stopped, not enabled
            try:
                return self._region(node, body, given)
            finally:
                self._stopped = before
        if name == "wrap_with_autocast":
            _, dtype, enabled, _, body, *given = args
            before, self._autocast = self._autocast, dtype if enabled else None
            try:
                return self._region(node, body, given)
            finally:
                self._autocast = before
        if name == "cond":
            return self._cond(node, *args)
        raise UnsupportedError(
            f"the region {name!r} of PyTorch's graph is not known; write what it does with ops of tensors"
        )

    def _region(self, node: torch.fx.Node, body: Any, given: Sequence[Any]) -> list[Any]:
        """A graph within the graph, whose arguments are tensors of this one: what it writes is written there, and what
        it gives may be a view of them.
        """
        import torch

        outside = [each for each in node.args if not (isinstance(each, torch.fx.Node) and each.op == "get_attr")]
        holders = [each for each in body.graph.nodes if each.op == "placeholder"]
        for holder, place in zip(holders, outside[len(outside) - len(given) :], strict=True):
            if isinstance(place, torch.fx.Node) and isinstance(place.meta.get("val"), torch.Tensor):
                self.places.alias(holder, place, tuple(place.meta["val"].shape))
        results = self._region_of(body, given)
        (made,) = next(iter(reversed(body.graph.nodes))).args
        self._pieces[node] = list(made)
        if not self._stopped:
            return results
        theirs = {self.places.tensor_of(x) for x in outside if isinstance(x, torch.fx.Node)}
        roots = [self.places.tensor_of(x) if isinstance(x, torch.fx.Node) else None for x in made]
        self._pieces[node] = [root if root in theirs else x for root, x in zip(roots, made)]
        self._quiet.update(x for root, x in zip(roots, made) if root is not None and root not in theirs)
        return [self.places[x] if x in theirs else self.stopped(y) for x, y in zip(self._pieces[node], results)]

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
        if isinstance(x, Pair):
            return Pair(self.stopped(x.real), self.stopped(x.imag))
        if isinstance(x, Tensor) and x.value.dtype.is_float:
            return Tensor(self.reader.tracer, self.reader.tracer.at().apply(StopGradient(), x.value))
        return x


def _is_check(node: torch.fx.Node) -> bool:
    """Whether an op gives nothing, and only looks at what it is given."""
    return hasattr(node.target, "_schema") and op_name(node.target).startswith(_CHECKS)


def path_of(node: torch.fx.Node) -> str:
    """The module that a node is in, as `named_modules` calls it."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return next((re.sub(r"@\d+", "", path) for path, _ in reversed(stack) if path), "")
