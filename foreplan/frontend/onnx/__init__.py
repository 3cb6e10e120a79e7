"""ONNX files → Graph. Importing this package does not import `onnx`; calling `from_onnx` does.

foreign       files that are no ONNX models
load, wire    the file: its skeleton without the weights' bytes, which stay where they are
order         nodes in order
uses, contents, roles  which weights are trained: by what the exporter tells, by uses, names and numbers
shapes, batch shapes bound by the caller, and another batch size than the file's; symbols are sizes that it names
model         one import; examples of what it lacks
importer, scope  the walk over the nodes, and what they can read; functions, control and constant are its special cases
fold          nodes whose inputs are known are computed at once
node, tensors what a translation sees: one node, and its operands
ops/          the translations, one file a family
origin        what it takes to write the file again
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan.base.arguments import names_in, whole
from foreplan.base.patterns import Selection
from foreplan.graph import Graph

if TYPE_CHECKING:
    import onnx


def declared_shapes(model: str | Path) -> dict[str, tuple[int | None, ...] | None]:
    """The inputs of an ONNX file with the extents that it fixes: None for an extent, or a shape, that it leaves open.

    Raises:
        ModelError, UnsupportedError: as `from_onnx`.
    """
    from foreplan.frontend.onnx.load import load_model
    from foreplan.frontend.onnx.shapes import fixed_extents, user_inputs

    return {info.name: fixed_extents(info) for info in user_inputs(load_model(model).proto.graph)}


def from_onnx(
    model: str | Path | onnx.ModelProto,
    shapes: Mapping[str, Sequence[int]] | None = None,
    batch: int | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    train: Iterable[str] = (),
    freeze: Iterable[str] = (),
) -> Graph:
    """The inference graph of an ONNX model, with static shapes.

    Large weights are not read; the graph holds their places in the file. Names of inputs, nodes, tensors and weights
    are those of the model. An ONNX file does not say what is trained. Which tensors become parameters follows from what
    the exporter tells, else from names, uses and a few of the numbers (see `foreplan.frontend.onnx.roles`). Each
    `Value.why` tells the reason, and `train` and `freeze` have the last word. Running statistics become buffers, and
    all others stay constants.

    Args:
        model: path of an .onnx file, or a ModelProto.
        shapes: input name → shape, for inputs whose sizes are symbolic in the file: `{"x": (1, 3, 224, 224)}`. Axes
            with the same symbol have one size, in all inputs. Names such as `?`, `-1`, `None` and `unk__7` are no
            symbols: they say that the size is not known. One shape may give several numbers to axes that the file calls
            by one name; a note then says that the name binds nothing.
        batch: extent of the first axis of every input, or of the axis that has the batch's symbol. Where the file
            fixes another one, shapes written within the model are rewritten too, and `Graph.notes` says which.
        values: input name → the array that it has in every step: `{"axes": [0, 1]}`. It is then no input of the
            graph. An input that decides shapes, such as a target shape, axes or a number of steps, needs one.
        train, freeze: weights that are trained, or are not, whatever they would be otherwise: see `foreplan.compile`.

    A Dropout is active in training steps only. With training_mode true it is active in every step, as in ONNX, and a
    note says so.

    Where the computed shape of an output differs from the declared one, the computed one counts, as in ONNX Runtime,
    and a note says so.

    Raises:
        ModelError: the file is missing, broken, or not an ONNX model.
        ShapeError: shapes are unbound or contradict each other, a node fixes the batch, or an output is declared with
            another element type.
        UnsupportedError: foreplan lacks an op, opset or element type of the model.
        ValueNeededError: a shape depends on values of inputs; its attribute `inputs` has their names.
        UsageError: an argument has the wrong type, or a value out of range.

    Source: the ONNX specification, IR versions 3 to 13, operators of opsets 1 to 28.
    """
    from foreplan.base.errors import ValueNeededError
    from foreplan.frontend.onnx.examples import Binding, with_all_shapes, with_all_values
    from foreplan.frontend.onnx.load import load_model
    from foreplan.frontend.onnx.model import import_model
    from foreplan.frontend.onnx.shapes import Unbound

    batch = None if batch is None else whole("batch", batch, 1)
    selection = Selection(tuple(names_in("train", train)), tuple(names_in("freeze", freeze)))
    loaded = load_model(model)
    try:
        return import_model(loaded, shapes, batch, values, selection)
    except Unbound as error:
        raise with_all_shapes(loaded, error, Binding.of(shapes, batch, values)) from None
    except ValueNeededError as error:
        raise with_all_values(loaded, error, Binding.of(shapes, batch, values)) from None
