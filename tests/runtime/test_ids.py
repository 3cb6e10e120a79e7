"""Ids of a table of words: a step takes those of its rows, however the ids come to the table, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import foreplan as fp
from foreplan import nn
from tests.frontend.onnx.models import model, node, random

ROWS, WIDTH = 7, 4


def table(ids: Any) -> Any:
    return nn.embedding(ids, ROWS, WIDTH, name="table")


def scanned(ids: Any) -> Any:
    return fp.scan(lambda c, i: (c + table(i), None), np.zeros((3, WIDTH)), ids)[0]


# How the ids of an input of [2, 3] come to the table.
WAYS: dict[str, Callable[[Any], Any]] = {
    "as they are": table,
    "in part": lambda ids: table(ids[:, :3]),
    "turned": lambda ids: table(ids.T.reshape(6)),
    "put together": lambda ids: table(np.concatenate([ids, ids], axis=1)),
    "a row": lambda ids: table(ids[1]),
    "in a loop": scanned,
    "of two tables": lambda ids: table(ids) + nn.embedding(ids, ROWS + 3, WIDTH, name="more"),
    "tied": lambda ids: table(ids) @ nn.shared("table.weight").T,
}


def refused(session: Any, batch: dict[str, Any], ids: np.ndarray, last: int = ROWS - 1) -> None:
    """Check that ids outside of the table's rows are refused and others taken."""
    session.step(batch | {"ids": ids})
    for wrong in (-1, -ROWS, last + 1, -(2**31), 2**31 - 1):
        given = ids.copy()
        given[..., -1, -1] = wrong
        with pytest.raises(fp.InputError, match=f"'ids' holds {wrong} at .*, and the model takes 0 to {last}"):
            session.step(batch | {"ids": given})


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("way", WAYS)
def test_a_table_takes_its_rows_and_no_others(way: str, dtype: str, target: str, tmp_path: Path) -> None:
    ids = np.array([[0, ROWS - 1, 3], [1, 2, 0]], dtype)
    graph = fp.trace(lambda ids: WAYS[way](ids), fp.spec((2, 3), dtype))
    refused(fp.compile(graph, target=target).bind(), {}, ids)
    step = fp.compile(graph, lambda output: (output * output).sum(), fp.optim.SGD(0.1), target=target)
    refused(step.bind(), {}, ids)
    step.save(str(tmp_path / "plan.json"))
    refused(fp.load_plan(str(tmp_path / "plan.json")).bind(), {}, ids)


def test_other_tables_may_be_smaller() -> None:
    graph = fp.trace(lambda ids: table(ids) + nn.embedding(ids, 4, WIDTH, name="less"), fp.spec((2, 3), "int64"))
    refused(fp.compile(graph).bind(), {}, np.array([[0, 1, 3], [1, 2, 0]]), last=3)


def test_known_ids_are_checked_when_the_graph_is_made() -> None:
    with pytest.raises(fp.ShapeError, match="the index -1 is outside an axis of 7 elements"):
        fp.trace(lambda x: x + table(np.array([0, -1])), fp.spec((2, WIDTH)))


def test_an_index_of_an_array_counts_from_the_end_as_in_numpy() -> None:
    graph = fp.trace(lambda x, ids: x[ids], fp.spec((ROWS, WIDTH)), fp.spec((3,), "int64"))
    x, ids = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32), np.array([-1, 0, -ROWS])
    np.testing.assert_array_equal(fp.compile(graph).bind().step({"x": x, "ids": ids}).outputs["output"], x[ids])


def test_groups_of_ranks_that_share_a_table_take_the_same_ids() -> None:
    model = fp.models.build("llama:layers=1,width=16,heads=2,kv_heads=2,features=16,seq=4,vocabulary=32,batch=2")
    step = fp.compile(model, fp.losses.cross_entropy, fp.optim.SGD(0.1), target="numpy", ranks=2, tensor=2)
    assert any(call.op.name == "local_index" for call in step.program.calls)
    assert {slot.name: slot.valid for slot in step.program.inputs if slot.name == "tokens"} == {"tokens": (0, 31)}


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
@pytest.mark.parametrize(
    ("op", "low"),
    [
        ("torch.ops.aten.embedding.default", 0),
        ("torch.ops.aten.index.Tensor", -8),
        ("torch.ops.aten.index_select.default", -8),
        ("", -8),
    ],
)
def test_a_table_that_pytorch_read_by_embedding_takes_no_negative_ids(op: str, low: int, target: str) -> None:
    """PyTorch refuses them there, and takes them where a tensor is indexed, as ONNX's Gather does."""
    gather = node("Gather", "w x", "y")
    if op:
        call = f"%y : [num_users=1] = call_function[target={op}](args = (%p_w, %x), kwargs = {{}})"
        gather.metadata_props.add(key="pkg.torch.onnx.fx_node", value=call)
    proto = model([gather], {"x": [2]}, ["y"], {"w": random(8, 3)})
    proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    session = fp.compile(fp.from_onnx(proto), target=target).bind()
    session.step({"x": np.array([low, 7])})
    for wrong in (low - 1, 8):
        with pytest.raises(fp.InputError, match=f"'x' holds {wrong} at .*, and the model takes {low} to 7"):
            session.step({"x": np.array([0, wrong])})
