"""What convolutions take for their own duration: who is asked what, and what it does to the peak. Without cuDNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import foreplan as fp
from foreplan.eager import Eager, Variant, Workspaces, as_pytorch
from foreplan.frontend import nn, spec, trace
from foreplan.graph import Graph, TensorType
from foreplan.ops.conv.common import ConvOp
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.runtime.cuda.workspaces import winograd_bytes

MIB = 1 << 20
IMAGE, FIRST = 64 * 64 * 4, 8 * 1 * 9 * 4  # bytes of one channel of a float32 image, and of the first weights


@dataclass
class Table:
    """A library that takes given bytes for each op.

    Attributes:
        asked: the questions, in order.
    """

    sizes: dict[str, int | None]
    name: str = "a table"
    remark: str = "as given"
    asked: list[tuple[ConvOp, tuple[TensorType, ...], TensorType]] = field(default_factory=list)

    def workspace(self, op: ConvOp, inputs: Sequence[TensorType], output: TensorType, limit: int | None) -> int | None:
        self.asked.append((op, tuple(inputs), output))
        nbytes = self.sizes[op.name]
        return nbytes if nbytes is None or limit is None or nbytes <= limit else None


def two() -> Graph:
    """1 → 8 → 1 channels, 3 × 3 taps, 64 × 64."""

    def model(x: Any) -> Any:
        y = nn.conv(x, 8, 3, padding=1, bias=False, name="a")
        return nn.conv(y, 1, 3, padding=1, bias=False, name="b")

    return trace(model, spec((1, 1, 64, 64)))


def counted(graph: Graph, sizes: dict[str, int | None], limit: int | None = None) -> tuple[Eager, Workspaces]:
    workspaces = Workspaces(limit, Table(sizes))
    return as_pytorch(graph, "mean", None, Variant(), True, workspaces=workspaces), workspaces


NONE: dict[str, int | None] = {"conv": 0, "conv_data_grad": 0, "conv_weight_grad": 0}


@pytest.mark.parametrize(
    ("op", "forward", "backward"),
    [
        # Forward: at the second convolution are there the input, 8 channels, and 1. Backward without workspaces: the
        # same 8 channels, their gradient, that of the result, and of the second weights; the loss and its gradient.
        ("conv", 10 * IMAGE + 2 * FIRST + MIB, 18 * IMAGE + 3 * FIRST + 8),
        # The gradient of the 8 channels is there, that of the weights is not yet.
        ("conv_data_grad", 10 * IMAGE + 2 * FIRST + 4, 18 * IMAGE + 2 * FIRST + 8 + MIB),
        ("conv_weight_grad", 10 * IMAGE + 2 * FIRST + 4, 18 * IMAGE + 3 * FIRST + 8 + MIB),
    ],
)
def test_the_peak_with_a_workspace_of_one_op(op: str, forward: int, backward: int) -> None:
    found, _ = counted(two(), NONE | {op: MIB})
    first, second = found.phases[2:4]
    assert (first.name, first.most) == ("forward", forward)
    assert (second.name, second.most) == ("backward", backward)
    assert found.phases[3].live == counted(two(), NONE)[0].phases[3].live  # it is given back
    largest = found.largest_workspace
    assert largest is not None and largest.nbytes == MIB and "workspace of" in largest.name


def test_no_workspace_is_no_block() -> None:
    found, _ = counted(two(), NONE)
    assert found.largest_workspace is None and found.phases[3].most == 18 * IMAGE + 3 * FIRST + 8


def test_the_caching_allocator_rounds_a_workspace() -> None:
    found, _ = counted(two(), NONE | {"conv_weight_grad": 2 * MIB + 1})
    none, _ = counted(two(), NONE)
    grown = found.replayed[3].most_allocated - none.replayed[3].most_allocated
    assert grown == 2 * MIB + 512  # to the next multiple of 512
    assert found.replayed[3].reserved - none.replayed[3].reserved == 20 * MIB  # a segment for more than 1 MiB
    assert found.replayed[3].allocated == none.replayed[3].allocated


def strided(x: Any) -> Any:
    return nn.conv(nn.conv(x, 6, 3, stride=2, padding=1, groups=2, name="a"), 8, 5, padding=2, dilation=1, name="b")


def transposed(x: Any) -> Any:
    return nn.conv_transpose(nn.conv(x, 6, 1, name="a"), 4, 2, stride=2, name="b")


@pytest.mark.parametrize("model", [strided, transposed])
def test_what_is_asked_is_what_foreplans_own_step_runs(model: Callable[[Any], Any]) -> None:
    """The three questions of each convolution, by op and types, are the nodes that differentiation makes."""
    graph = trace(model, spec((2, 4, 16, 16)))
    _, workspaces = counted(graph, NONE)
    step = fp.differentiate(graph, loss=fp.losses.mean, optimizer=fp.optim.SGD(0.1))
    own = {
        (node.op, tuple(x.type for x in node.inputs[:2]), node.outputs[0].type)
        for node in step.nodes
        if isinstance(node.op, ConvOp)
    }
    library = workspaces.library
    assert isinstance(library, Table) and set(library.asked) == own and len(own) == 5  # of the input no gradient


def test_depthwise_convolutions_are_pytorchs_own() -> None:
    graph = trace(lambda x: nn.conv(x, 8, 3, padding=1, groups=4), spec((1, 4, 16, 16)))
    found, workspaces = counted(graph, {})
    assert found.largest_workspace is None and workspaces.notes == ()
    pairs = trace(lambda x: nn.conv(x, 8, 3, padding=1, groups=2), spec((1, 4, 16, 16)))
    assert counted(pairs, NONE | {"conv": MIB})[0].largest_workspace is not None


def test_a_limit_and_what_has_no_engine_within_it() -> None:
    sizes = {"conv": 0, "conv_data_grad": MIB, "conv_weight_grad": 3 * MIB}
    found, workspaces = counted(two(), sizes, 2 * MIB)
    largest = found.largest_workspace
    assert largest is not None and (largest.nbytes, "gradient of the data" in largest.name) == (MIB, True)
    assert list(workspaces.without) == ["b/conv", "a/conv"]
    assert "within 2.00 MiB of a table" in found.notes[0] and "no engine within 2.00 MiB for 2 nodes" in found.notes[1]
    none, zero = counted(two(), sizes, 0)
    assert (
        none.largest_workspace is None
        and zero.notes == ()
        and none.notes == ("the workspace of cuBLAS is not counted",)
    )


def test_without_a_library_each_gradient_takes_the_size() -> None:
    found = as_pytorch(two(), "mean", None, Variant(workspace="1MiB"), True)
    names = [block.name for block in found.memory.blocks if "workspace" in block.name]
    each = ["b/conv: workspace of gradient of the data", "b/conv: workspace of gradient of the weight"]
    assert names == [*each, "a/conv: workspace of gradient of the weight"] * 3
    assert found.phases[3].most == 18 * IMAGE + 3 * FIRST + 8 + MIB
    free = as_pytorch(two(), "mean", None, Variant(), True, workspaces=Workspaces(None, None, "it is raining"))
    assert "not counted" in free.notes[0] and "it is raining" in free.notes[0] and "workspace=SIZE" in free.notes[0]


SAME = ((1, 1), ((1, 1), (1, 1)), (1, 1))


def of_weights(x: str, g: str, **more: Any) -> int | None:
    op = ConvWeightGrad(*more.get("how", SAME), kernel=more.get("kernel", (3, 3)), groups=more.get("groups", 1))
    parts = [fp.graph.types.tensor_type(text) for text in (x, g)]
    return winograd_bytes(op, parts)


def test_the_transforms_of_a_winograd_engine() -> None:
    """6 × 6 numbers of each tile of 4 × 4 positions and channel, and of each pair of channels, by hand."""
    chain = of_weights("float32[1,256,1024,1024]", "float32[1,128,1024,1024]")
    assert chain == (256 * 256 * 384 + 256 * 128) * 36 * 4 == 3460 * MIB + MIB // 2
    assert of_weights("float32[2,64,7,5]", "float32[2,64,7,5]") == (2 * 2 * 2 * 128 + 64 * 64) * 36 * 4
    assert of_weights("float32[1,64,8,8]", "float32[1,63,8,8]") is None
    assert of_weights("float32[1,64,8,8]", "float32[1,64,8,8]", kernel=(5, 5)) is None
    strided = ((2, 2), ((1, 1), (1, 1)), (1, 1))
    assert of_weights("float32[1,64,8,8]", "float32[1,64,4,4]", how=strided) is None
    assert of_weights("float32[1,128,8,8]", "float32[1,128,8,8]", groups=2) is None
    types = [fp.graph.types.tensor_type("float32[1,64,8,8]"), fp.graph.types.tensor_type("float32[64,64,3,3]")]
    assert (
        winograd_bytes(Conv(*SAME), types) is None
        and winograd_bytes(ConvDataGrad(*SAME, spatial=(8, 8)), types) is None
    )
