"""Segments in parts, beside the texts of `split_segments/`: drawn ones of models give the same; errors."""

from __future__ import annotations

import re
from random import Random

import numpy as np
import pytest

import foreplan as fp
from foreplan.compiler.pipeline import passes_of_inference
from foreplan.graph import Graph, parse_graph
from foreplan.options import Options
from foreplan.passes import run_passes, simplified
from foreplan.passes.expand_gradients import expand_gradients
from foreplan.passes.tile.search import tiles
from foreplan.passes.tile.segments import SplitSegments, segments
from foreplan.passes.tile.tile import tiled
from foreplan.passes.training import training_form
from tests.ops.check import evaluate
from tests.passes.texts import FOLDER, cases_of
from tests.profile import pick

SMALL = "width=16,heads=2"
NETS = (
    f"gpt2_small:batch=2,seq=8,layers=2,vocabulary=32,{SMALL}",
    f"bert_base:batch=2,seq=8,layers=2,vocabulary=32,{SMALL}",
    f"llama:batch=2,seq=8,layers=2,kv_heads=1,features=24,vocabulary=32,{SMALL}",
    f"vit_b16:batch=3,size=32,layers=2,{SMALL}",
    f"t5_small:batch=2,seq=8,decoder_seq=6,layers=1,depth=8,features=24,vocabulary=32,{SMALL}",
    "conv_chain:batch=2,size=16",
    "convnext_tiny:batch=3,size=64,blocks=1,width=8",
    "unet:batch=2,size=32,width=4",
    "mlp:batch=8,width=16,inputs=8,classes=4",
    "mobile",
)


@pytest.fixture(scope="module")
def mobile() -> Graph:
    """Depth-wise convolutions, strides, residuals, pools, groups, and images that grow again."""

    def model(images: fp.Tensor) -> fp.Tensor:
        x = fp.nn.relu(fp.nn.batch_norm(fp.nn.conv(images, 8, 3, stride=2, padding=1, name="stem"), name="bn"))
        x = fp.nn.max_pool(x, 3, stride=2, padding=1)
        y = fp.nn.conv(x, 8, 3, padding=1, groups=8, name="deep")
        y = fp.nn.relu6(fp.nn.batch_norm(y, name="bn2"))
        x = x + fp.nn.conv(y, 8, 1, name="point")
        y = fp.nn.conv(x, 12, (3, 5), stride=(1, 2), padding=(0, 3), dilation=(2, 1), groups=4, name="grouped")
        y = fp.nn.upsample(fp.nn.silu(y), 2)
        return fp.nn.linear(fp.nn.global_avg_pool(y), 5, name="head")

    return fp.trace(model, fp.spec((4, 3, 37, 29)), name="mobile")


def forward(model: Graph, trains: bool) -> Graph:
    """A net as the pass sees it, in float64."""
    entries = passes_of_inference(Options(split={"a": 2}, target="numpy"))
    graph = run_passes(model, entries[: [each.name for each in entries].index("split_segments")])
    graph = simplified(expand_gradients(training_form(graph))) if trains else graph
    return parse_graph(re.sub(r"array\(crc32=\w+\)", "fill(1)", graph.as_text().replace("float32", "float64")))


def results(graph: Graph, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    given = {
        x.name: rng.normal(size=x.shape) if x.dtype.is_float else rng.integers(0, 3, x.shape).astype(x.dtype.numpy)
        for x in graph.inputs
    }
    found = evaluate(graph, given, hard=False)
    updates = {old.name: new for old, new in graph.updates.items()}
    return [found[value] for value in (*graph.outputs.values(), *(updates[name] for name in sorted(updates)))]


@pytest.mark.parametrize("name", NETS)
def test_drawn_segments_give_the_same(name: str, mobile: Graph) -> None:
    """Up to the order of additions; to normalise a few numbers makes more of a rounding."""
    rng = Random(name)
    graph = forward(mobile if name == "mobile" else fp.models.build(name), trains=rng.random() < 0.5)
    expected = results(graph)
    tried = 0
    for _ in range(pick(2, 5, 60)):
        begin = rng.randrange(len(graph.nodes))
        nodes = [n for n in graph.nodes[begin : begin + rng.choice((2, 3, 5, 8, 20))] if rng.random() < 0.9]
        ways = list(tiles(graph, nodes, rng.choice((2, 3, 4)), nodes)) if nodes else []
        for tile in rng.sample(ways, min(len(ways), 2)):
            split = tiled(graph, tile)
            gone = {value.name for value in tile.never_whole(graph)}
            assert gone.isdisjoint(value.name for node in split.nodes for value in node.outputs), tile
            for new, old in zip(results(split), expected, strict=True):
                np.testing.assert_allclose(new, old, rtol=1e-7, atol=1e-7 * max(1, np.abs(old).max(initial=0)))
            tried += 1
    assert tried


PAIR = cases_of(FOLDER / "split_segments" / "segments.txt")[0].before


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"b": 2}, "'b' names no operation of the model; close names are 'a'"),
        ({"a.q..a.p": 2}, "the model has 'a.p' before 'a.q'"),
        ({"a.p": 2}, "'a.p' cannot run in 2 parts"),
        ({"a": 9}, "'a' cannot run in 9 parts"),
    ],
)
def test_what_cannot_be_split(entries: dict[str, int], told: str) -> None:
    with pytest.raises(fp.UsageError, match=re.escape(told)):
        SplitSegments(entries)(parse_graph(PAIR))


def test_a_pattern_means_each_of_its_scopes() -> None:
    """As if they were named one by one, though each reads what the one before gives."""
    graph = forward(fp.models.build(NETS[0]), trains=False)
    named = SplitSegments({"h.0": 2, "h.1": 2})(graph)
    assert SplitSegments({"h.*": 2})(graph).as_text() == named.as_text() != graph.as_text()


CHAIN = """graph %g
input %x: float32[4]
%a.p: float32[4] = map(exprs=('(a0 + 1.0)',)) [%x] as %a.p
%b.p: float32[4] = map(exprs=('(a0 * 2.0)',)) [%a.p] as %b.p
%b.q: float32[4] = map(exprs=('(a0 * 3.0)',)) [%b.p] as %b.q
%c: float32[4] = map(exprs=('(a0 - 1.0)',)) [%b.q] as %c
output %c = %c
"""


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("b", ["b.p", "b.q"]),
        ("a..b", ["a.p", "b.p", "b.q"]),  # to the last operation of the scope
        ("b..c", ["b.p", "b.q", "c"]),  # from the first
        ("b..b", ["b.p", "b.q"]),
        ("c..c", ["c"]),
    ],
)
def test_a_range_goes_from_the_first_to_the_last_operation(entry: str, names: list[str]) -> None:
    found = segments(parse_graph(CHAIN), entry)
    assert [node.outputs[0].name for nodes in found.values() for node in nodes] == names


@pytest.mark.parametrize("entry", ["a..loss", "loss"])
def test_the_loss_ends_a_range_of_a_step_alone(entry: str) -> None:
    with pytest.raises(fp.UsageError, match="'loss' names no operation of the model"):
        SplitSegments({entry: 2})(parse_graph(CHAIN))
