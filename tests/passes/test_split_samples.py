"""Parts of the batch, forward and back: the same losses, gradients and updates as the whole step, in less memory."""

from __future__ import annotations

import re
from random import Random

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.units import parse_budget
from foreplan.compiler.pipeline import passes_of_training
from foreplan.graph import Graph, parse_graph
from foreplan.options import Options
from foreplan.passes import Differentiate, differentiate, run_passes, simplified
from foreplan.passes.pipeline import Entries
from foreplan.passes.tile.live_bytes import live_bytes
from foreplan.passes.tile.samples import SplitBands, SplitLogits, SplitSamples, samples_in_parts
from foreplan.passes.tile.segments import SplitSegments
from tests.ops.check import evaluate
from tests.profile import cases, pick

SMALL = "width=16,heads=2"
TOKENS = f"batch=4,seq=8,layers=2,vocabulary=32,{SMALL}"
GPT = f"gpt2_small:{TOKENS},dropout=0.1"
NETS = (
    GPT,
    f"bert_base:{TOKENS}",
    f"llama:{TOKENS},kv_heads=1,features=24",
    f"vit_b16:batch=5,size=32,layers=2,{SMALL}",
    f"t5_small:batch=4,seq=8,decoder_seq=6,layers=1,depth=8,features=24,vocabulary=32,{SMALL}",
    "mixer_b16:batch=4,size=32,layers=2,width=16",
    "convnext_tiny:batch=3,size=64,blocks=1,width=8",
    "swin_t:batch=2,size=56,width=8,blocks=1,heads=1",
    "ddpm_unet:batch=2,size=16,layers=1,width=8,groups=2",
    "resnet18:batch=4,size=32",
    "lstm_lm:batch=4,seq=3,layers=1,width=8,vocabulary=16",
    "dlrm:batch=6,rows=16",
    "mlp:batch=8,width=16,inputs=8,classes=4",
    "conv_chain:size=24",
    "unet:batch=1,size=32,width=4",
)


def before_parts(loss: str) -> Entries:
    """The passes before those of parts up to the loss."""
    entries = passes_of_training(Options(loss, split={"a..loss": 2}, target="numpy"))
    return entries[: [each.name for each in entries].index("split_segments")]


def forward(name: str) -> Graph:
    """A net with its loss as the pass sees it, in float64."""
    graph = run_passes(fp.models.build(name), before_parts(fp.models.default_loss(name)))
    return parse_graph(re.sub(r"array\(crc32=\w+\)", "fill(1)", graph.as_text().replace("float32", "float64")))


def step_of(graph: Graph) -> Graph:
    """The step that returns gradients."""
    return simplified(Differentiate(in_turn=True)(graph))


def results(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """The loss, gradients and updates; some targets are to be ignored."""
    rng = np.random.default_rng(seed)
    given = {}
    for x in graph.inputs:
        given[x.name] = rng.normal(size=x.shape) if x.dtype.is_float else rng.integers(0, 3, x.shape)
        if x.name == "target" and not x.dtype.is_float:
            given[x.name][..., :1] = np.where(rng.random((*x.shape[:-1], 1)) < 0.4, -100, given[x.name][..., :1])
        given[x.name] = given[x.name].astype(x.dtype.numpy)
    found = evaluate(graph, given, hard=False)
    assert graph.loss is not None
    named = {"loss": graph.loss, **graph.gradients, **{f"{old.name}/next": new for old, new in graph.updates.items()}}
    return {name: found[value] for name, value in named.items()}


@pytest.mark.parametrize("name", cases(NETS, thorough=("resnet18",)))  # the U-Nets have batch norms, too
def test_drawn_segments_give_the_same(name: str) -> None:
    """Losses, gradients and updates, up to the order of additions: of layers from anywhere, in any number of parts."""
    rng = Random(name)
    graph = forward(name)
    expected = results(step_of(graph))
    tried = 0
    begins = [0, *(rng.randrange(len(graph.nodes)) for _ in range(pick(1, 2, 30)))]
    for begin in begins:
        found = samples_in_parts(graph, graph.nodes[begin:], rng.choice((2, 3, 4)))
        if found is None:
            continue
        for key, new in results(step_of(found[0])).items():
            old = expected[key]
            np.testing.assert_allclose(new, old, rtol=1e-7, atol=1e-9 * max(1, np.abs(old).max(initial=0)), err_msg=key)
        tried += 1
    assert tried


def images(rng: Random) -> Graph:
    """A drawn net of windows over images, with its loss over all pixels, in float64."""
    batch, size = rng.choice((1, 1, 2)), (rng.randint(12, 40), rng.randint(5, 20))

    def layer(x: fp.Tensor, i: int) -> fp.Tensor:
        kind, channels, taps = rng.randrange(6), rng.choice((2, 4)), rng.choice((1, 2, 3, 5))
        if kind < 3:
            padding, dilation, stride = rng.randint(0, 2), rng.choice((1, 1, 2)), rng.choice((1, 1, 1, 2))
            if min(x.shape[2:]) + 2 * padding <= dilation * (taps - 1) + stride:
                return fp.nn.tanh(x)
            groups = rng.choice((1, 2)) if x.shape[1] % 2 == 0 else 1
            made = fp.nn.conv(
                x, channels, taps, stride=stride, padding=padding, dilation=dilation, groups=groups, name=f"conv{i}"
            )
            return fp.nn.gelu(made) if rng.random() < 0.7 else made
        if kind == 3 and min(x.shape[2:]) >= 4:
            return fp.nn.max_pool(x, rng.choice((2, 3)), stride=rng.choice((1, 2)))
        if kind == 4:
            return np.concatenate([x, fp.nn.sigmoid(x)], axis=1) if x.shape[1] < 8 else x * x
        return fp.nn.relu(x) + x

    def model(x: fp.Tensor) -> fp.Tensor:
        for i in range(rng.randint(2, 6)):
            x = layer(x, i)
        return fp.nn.conv(x, 3, 1, name="head")

    traced = fp.trace(model, fp.spec((batch, 3, *size)), name="net")
    graph = run_passes(traced, before_parts(rng.choice(("mse", "mean", "cross_entropy", "l1"))))
    return parse_graph(graph.as_text().replace("float32", "float64"))


def test_bands_of_drawn_nets_give_the_same() -> None:
    """Windows of any strides, dilations and pads, extents that nothing divides, and four losses."""
    banded, added = 0, 0
    for seed in range(pick(20, 30, 600)):
        rng = Random(f"bands {seed}")
        graph = images(rng)
        count = rng.choice((2, 3, 4, 7))
        found = samples_in_parts(graph, graph.nodes[rng.choice((0, 0, rng.randrange(len(graph.nodes)))) :], count)
        if found is None:
            continue
        banded += f"in {count} parts along axis" in found[0].notes[-1]
        added += "are computed twice" in found[0].notes[-1]
        expected = results(step_of(graph))
        for key, new in results(step_of(found[0])).items():
            old = expected[key]
            np.testing.assert_allclose(new, old, rtol=1e-7, atol=1e-9 * max(1, np.abs(old).max(initial=0)), err_msg=key)
    assert banded > pick(8, 12, 250) and added > pick(4, 6, 120)


def test_a_band_runs_back_before_the_next() -> None:
    """Four bands of an image: a quarter of the activations, and what their windows share."""
    graph = forward("conv_chain:size=320")
    steps = []
    for each in (graph, SplitBands(4)(graph)):
        steps.append(max(live_bytes(Differentiate(in_turn=True)(each))))
    assert steps[1] < 0.36 * steps[0]
    assert "in 4 parts along axis 2 of what the loss adds up" in SplitBands(4)(graph).notes[-1]


def test_each_part_runs_back_before_the_next() -> None:
    """With four parts, the activations of one are there: a quarter."""
    graph = forward("gpt2_small:batch=4,seq=64,layers=4,width=64,heads=2,vocabulary=32")
    found = samples_in_parts(graph, graph.nodes, 4)
    assert found is not None
    weights = sum(value.type.nbytes for value in graph.parameters)
    steps = differentiate(graph), differentiate(found[0]), Differentiate(in_turn=True)(found[0])
    whole, listed, turns = (max(live_bytes(each)) - weights for each in steps)
    assert turns < 0.35 * whole < 0.6 * listed


def test_gradients_are_added_up_in_place() -> None:
    """The product that gives the next part's share takes the sum so far."""
    graph = forward("mlp:batch=8,width=16,inputs=8,classes=4")
    found = samples_in_parts(graph, graph.nodes, 4)
    assert found is not None
    step = step_of(found[0])
    adding = [node for node in step.nodes if node.op.name == "matmul" and len(node.inputs) == 3]
    weights = [value for value in graph.parameters if len(value.shape) == 2]
    assert sum(node.outputs[0].shape == value.shape for node in adding for value in weights[:1]) >= 3


def test_large_logits_are_made_some_rows_at_a_time() -> None:
    graph = forward("gpt2_small:batch=2,seq=512,layers=1,width=8,heads=1,vocabulary=40000")
    found = samples_in_parts(graph, graph.nodes, 2)
    assert found is not None
    before, after = (
        max(value.type.nbytes for node in each.nodes for value in node.outputs if 40000 in value.shape)
        for each in (found[0], SplitLogits()(found[0]))
    )
    assert after <= parse_budget("56MiB") < before


def test_a_batch_that_nothing_divides_has_no_part_for_each_sample() -> None:
    graph = forward("mlp:batch=839,width=64,layers=6,inputs=8,classes=4")  # a prime number
    usual, few = SplitSamples()(graph).notes[-1], SplitSamples(4)(graph).notes[-1]
    assert 4 < int(usual.split(" run in ")[1].split()[0]) < 128 and " run in 4 parts of the batch" in few


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"nowhere..loss": 2}, "'nowhere' names no operation"),
        ({"h.0..loss": 40}, "nothing before the loss can run in 40 parts; the batch has 4 samples"),
    ],
)
def test_what_cannot_be_split(entries: dict[str, int], told: str) -> None:
    with pytest.raises(fp.UsageError, match=re.escape(told)):
        SplitSegments(entries)(forward(GPT))
