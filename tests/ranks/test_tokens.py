"""Between products in parts, ranks of a group compute some of the tokens each, and train as one process does."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import optim
from foreplan.compiler.step_graphs import graphs_of_step
from foreplan.frontend import Tensor, nn
from foreplan.graph import Fill, Graph, Kind, Normal, Value, parse_graph
from foreplan.ops.collective import AllGather, AllReduce, ReduceScatter
from foreplan.options import Options
from tests.profile import pick, values
from tests.ranks.test_tensor_drawn import Draw
from tests.ranks.threads import run
from tests.ranks.training import assert_close, assert_same, own_part, trained

GPT = "gpt2_small:layers=2,width=32,heads=4,seq=8,vocabulary=60"
TEXTS = {
    "gpt": GPT,
    "words that do not divide": "gpt2_small:layers=2,width=32,heads=4,seq=8,vocabulary=61",
    "heads that do not divide": "gpt2_small:layers=2,width=30,heads=3,seq=8,vocabulary=60",
    "llama": "llama:layers=2,width=32,heads=8,kv_heads=4,features=48,seq=8,vocabulary=60",
    "bert": "bert_base:layers=1,width=32,heads=4,seq=8,vocabulary=60",
    "t5": "t5_small:layers=1,width=32,heads=4,depth=8,features=48,seq=8,decoder_seq=4,vocabulary=60",
}


def step_of(text: str, tensor: int, **options: Any) -> Graph:
    """The graph of a step of one group."""
    given: dict[str, Any] = {"target": "numpy", "ranks": tensor, "tensor": tensor} | options
    step, _ = graphs_of_step(fp.models.build(text), Options(fp.losses.cross_entropy, optim.SGD(0.1), **given))
    return step


GROUPS = [
    ("none", 2, 2, 1),
    ("parameters", 4, 4, 1),
    ("state", 4, 2, 3),
    ("gradients", 4, 4, 3),
    ("parameters", 4, 2, 1),
]


@pytest.mark.parametrize(("name", "group"), values(TEXTS, GROUPS))
def test_positions_are_cut_where_samples_do_not_divide(name: str, group: tuple[str, int, int, int]) -> None:
    """A group takes one sample, or three."""
    shard, ranks, tensor, batch = group
    samples = batch * ranks // tensor

    def build(batch: int) -> Graph:
        return fp.models.build(f"{TEXTS[name]},batch={batch}")

    (alone,) = trained(build, optim.Momentum(0.2), 1, samples, labels=2)
    found = trained(build, optim.Momentum(0.2), ranks, samples, labels=2, tensor=tensor, shard=shard)
    assert_close(found[0], alone)
    for each in found[1:]:
        assert_same(each, found[0])
        assert each.log == found[0].log


class Mixed(Draw):
    """Networks in which some layers do not divide, and more is computed between them."""

    def layer(self, name: str) -> Any:
        """Of one kind, or one between others."""
        if self.one_of(True, False):
            return super().layer(name)
        return self.one_of(
            self.odd, self.by_hand, self.of_positions, self.turned, self.halves, self.over_tokens, self.with_itself
        )(name)

    def odd(self, name: str) -> Any:
        """Two products whose features do not divide."""
        features = self.tensor * int(self.rng.integers(1, 3)) + 1
        up, down = self.matrix(f"{name}.up", self.width, features), self.matrix(f"{name}.down", features, self.width)
        return lambda x, mask: x + down(nn.relu(up(x)))

    def by_hand(self, name: str) -> Any:
        """A norm that is written out."""

        def layer(x: Tensor, mask: Tensor) -> Tensor:
            gain = nn.parameter(f"{name}.gain", (self.width,), init=Fill(1.0))
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1.0) * gain

        return layer

    def of_positions(self, name: str) -> Any:
        """A weight for each position."""
        return lambda x, mask: x + nn.parameter(f"{name}.table", (self.seq, self.width), init=Normal(0.3))

    def turned(self, name: str) -> Any:
        """Positions before samples."""
        return lambda x, mask: np.transpose(np.tanh(np.transpose(x, (1, 0, 2))), (1, 0, 2))

    def halves(self, name: str) -> Any:
        """Along the width, which is put together again."""
        half = self.width // 2
        return lambda x, mask: np.concatenate([x[..., half:], np.sin(x[..., :half])], axis=-1)

    def over_tokens(self, name: str) -> Any:
        """What needs all positions."""
        return lambda x, mask: x - x.mean(1, keepdims=True)

    def with_itself(self, name: str) -> Any:
        """Products of a tensor with itself: rows of one factor, and all of the other."""
        way = self.one_of("attention", "columns")

        def layer(x: Tensor, mask: Tensor) -> Tensor:
            if way == "columns":
                return x + 0.1 * x @ (x.mT @ x)
            return x + nn.softmax(x @ x.mT) @ x

        return layer


@pytest.mark.parametrize("seed", range(pick(5, 8, 400)))
def test_drawn_networks(seed: int) -> None:
    """Whatever lies between products, and whether it divides or not."""
    options = {"loss": fp.losses.mse, "target": "numpy"}
    for more in range(50):
        drawn = Mixed(1000 * seed + more)
        ranks, batch = drawn.tensor * (1 + seed % 2), 1 + seed % 4
        samples = batch * ranks // drawn.tensor
        try:
            (alone,) = trained(drawn.build, optim.Momentum(0.002), 1, samples, **options)
            if max(alone.losses) < 1e4:  # others are powers of powers
                found = trained(drawn.build, optim.Momentum(0.002), ranks, samples, tensor=drawn.tensor, **options)
                break
        except fp.ForeplanError as error:
            assert "nothing" in str(error)
    assert_close(found[0], alone)
    for each in found[1:]:
        assert_same(each, found[0])
        assert each.log == found[0].log


def exchanges(step: Graph) -> Counter[tuple[str, int]]:
    """How often what is exchanged in a group, by op and bytes of the whole; gradients of weights aside."""
    found = Counter[tuple[str, int]]()
    for node in step.nodes:
        of_weights = node.name.startswith(("gradients", "mean"))
        if isinstance(node.op, AllGather | ReduceScatter | AllReduce) and not of_weights:
            whole = node.outputs[0] if isinstance(node.op, AllGather) else node.inputs[0]
            found[node.op.name, whole.type.nbytes] += 1
    return found


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_what_is_exchanged(batch: int) -> None:
    """A sum and a gather before and behind each half of a block, forward and back; and each gather but the last again,
    as in Megatron-LM. The table of embeddings has one sum, and the logits one gather.
    """
    step = step_of(f"{TEXTS['llama']},batch={batch}", 2)
    assert parse_graph(step.as_text()) is not None
    found = exchanges(step)
    activation, halves = batch * 8 * 32 * 4, 2 * 2
    assert found["all_gather", activation] == 2 * (halves + 1) + halves
    assert found["reduce_scatter", activation] == 2 * (halves + 1)
    assert found["all_reduce", activation] == 0


def kept(text: str, tensor: int) -> int:
    """Bytes that the forward pass of a step leaves to the backward pass, copies of weights aside."""
    step = step_of(text, tensor, precision="bf16")
    roots, reached = dict[Value, Value](), set(step.inputs)
    for node in step.nodes:
        if not reached.isdisjoint(node.inputs) or node.op.is_random:
            reached.update(node.outputs)
        if node.op.is_view:
            roots[node.outputs[0]] = roots.get(node.inputs[0], node.inputs[0])
    backward = [node for node in step.nodes if node.outputs[0].kind is not Kind.ACTIVATION and not node.op.is_view]
    read = {roots.get(x, x) for node in backward for x in node.inputs}
    return sum(value.type.nbytes for value in read if value.kind is Kind.ACTIVATION and value in reached)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_activations_of_a_layer(tensor: int) -> None:
    """Korthikanti et al., table 2, sequence parallelism with selective recomputation: 34 s b h / t bytes a layer. The
    paper leaves out statistics: 8 bytes a row of each of two norms, and 4 for each query of each head in attention.
    """
    b, s, h, a = 2, 64, 128, 4
    text = f"gpt2_small:width={h},heads={a},seq={s},vocabulary=64,batch={b},dropout=0.1"
    layer = kept(f"{text},layers=3", tensor) - kept(f"{text},layers=2", tensor)
    assert layer == (34 * s * b * h + (2 * 8 + 4 * a) * s * b) // tensor


def test_what_is_gathered_does_not_stay() -> None:
    """No plan holds two of them at the end of the forward pass, however many layers there are."""

    def planned(layers: int) -> int:
        text = f"gpt2_small:layers={layers},width=64,heads=4,seq=256,vocabulary=64,batch=1"
        options: dict[str, Any] = {"target": "numpy", "ranks": 4, "tensor": 4}
        step = fp.compile(fp.models.build(text), fp.losses.cross_entropy, optim.SGD(0.1), **options)
        return int(step.estimate()["categories"]["communication"])

    assert planned(6) <= planned(3) <= 4 * 256 * 64 * 4


def test_masks_are_alike_where_ranks_compute_the_same() -> None:
    """Where tokens do not divide, the masks of a group are those of one process; other groups have others."""
    text = "gpt2_small:layers=2,width=32,heads=4,seq=7,vocabulary=60,dropout=0.3"

    def build(batch: int) -> Graph:
        return fp.models.build(f"{text},batch={batch}")

    (alone,) = trained(build, optim.SGD(0.1), 1, 1)
    assert_close(trained(build, optim.SGD(0.1), 2, 1, tensor=2)[0], alone)
    assert trained(build, optim.SGD(0.1), 4, 2, tensor=2)[0].losses != trained(build, optim.SGD(0.1), 1, 2)[0].losses


def test_masks_differ_between_tokens() -> None:
    """Two samples through layers of ones: the loss is the sum of squares of how many units are kept. Ranks that take a
    sample each, with one mask, would keep as many in both.
    """

    def units(x: Tensor) -> dict[str, Tensor]:
        hidden = nn.linear(x, 4, name="up", weight_init=Fill(0.25), bias=False)
        whole = nn.dropout(nn.linear(hidden, 64, name="down", weight_init=Fill(1.0), bias=False), 0.5)
        return {"kept": whole.sum(-1)}

    graph = fp.trace(units, fp.spec((2, 1), "float32"))
    step = fp.compile(graph, fp.losses.mse, optim.SGD(0.0), target="numpy", ranks=2, tensor=2)
    assert "1 of 1 sums" in str(step.program.notes)

    def job(world: Any) -> list[float]:
        session = step.bind(seed=1)
        batch = {"x": np.ones((2, 1), np.float32), "target": np.zeros((2,), np.float32)}
        return [session.step(batch).loss for _ in range(12)]

    losses, others = run(2, job)
    assert losses == others
    sums = [round(2 * loss / 4) for loss in losses]  # of squares of two numbers; what is kept is doubled
    pairs = [{(i, j) for i in range(65) for j in range(65) if i * i + j * j == total} for total in sums]
    assert all(pairs), sums
    assert not all(2 * round((total / 2) ** 0.5) ** 2 == total for total in sums), "both samples have one mask"


@pytest.mark.parametrize(("ranks", "batch"), [(2, 4), (2, 3), (4, 4)])
def test_gradients_of_inputs(ranks: int, batch: int) -> None:
    """Each rank of a group gives those of all of the group's samples, of the mean of all losses."""
    rng = np.random.default_rng(0)
    samples = batch * ranks // 2
    whole = {"x": rng.standard_normal((samples, 784), np.float32), "target": rng.integers(0, 10, samples)}

    def compiled(batch: int, **options: Any) -> fp.Compiled:
        graph = fp.models.build(f"mlp:width=8,layers=2,batch={batch}")
        return fp.compile(graph, fp.losses.cross_entropy, optim.SGD(0.1), target="numpy", gradients=["x"], **options)

    step = compiled(batch, ranks=ranks, tensor=2)

    def job(world: Any) -> np.ndarray:
        own = own_part(whole, world.rank // 2, ranks // 2)
        return step.bind(seed=1).step(own).gradients["x"]

    wanted = compiled(samples).bind(seed=1).step(whole).gradients["x"]
    found = run(ranks, job)
    for rank, gradient in enumerate(found):
        group = rank // 2
        np.testing.assert_allclose(gradient, wanted[group * batch : (group + 1) * batch], atol=1e-8)


def test_outputs_are_of_all_tokens() -> None:
    """What a step returns beside its loss is whole on each rank."""
    graph = fp.models.build(f"{TEXTS['words that do not divide']},batch=2")
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, 61, (2, 8)), "target": rng.integers(0, 61, (2, 8))}
    (name,) = graph.outputs

    def logits(world: Any = None, **options: Any) -> np.ndarray:
        step = fp.compile(graph, fp.losses.cross_entropy, optim.SGD(0.1), target="numpy", outputs=[name], **options)
        return step.bind(seed=1).step(batch).outputs[name]

    wanted = logits()
    for found in run(2, lambda world: logits(world, ranks=2, tensor=2)):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("way", ["checkpoint", "recompute", "budget"])
def test_less_memory_beside_tokens(way: str) -> None:
    """What is recomputed between sums and gathers gives the same."""

    def build(batch: int) -> Graph:
        return fp.models.build(f"{TEXTS['llama'].replace('seq=8', 'seq=64')},batch={batch}")

    options: dict[str, Any] = {
        "checkpoint": {"checkpoint": ["model.layers.*"]},
        "recompute": {"recompute": ["model.layers.*"]},
        "budget": {"budget": 0.93, "fission": "off"},
    }[way]
    plain = trained(build, optim.Momentum(0.2), 2, 1, tensor=2)
    found = trained(build, optim.Momentum(0.2), 2, 1, tensor=2, **options)
    for one, other in zip(found, plain):
        assert_same(one, other)
        assert one.allocated < other.allocated


@pytest.mark.parametrize(
    ("text", "tensor", "said"),
    [
        (f"{GPT},batch=1", 2, "5 of 5 sums of products give each rank its own tokens alone$"),
        (
            f"{GPT.replace('seq=8', 'seq=7')},batch=1",
            2,
            r"'wte/gather' all of them: 2 ranks do not divide the 7 elements",
        ),
        (
            f"{TEXTS['words that do not divide']},batch=2",
            2,
            "computes 'matmul' for its own tokens, with all of .*; 4 of 4 sums",
        ),
        (
            f"{TEXTS['heads that do not divide']},batch=1",
            2,
            "all of them: more would have to be gathered than what is summed",
        ),
    ],
)
def test_what_is_said(text: str, tensor: int, said: str) -> None:
    (note,) = [note for note in step_of(text, tensor).notes if note.startswith(f"tensor={tensor}")]
    assert re.search(said, note), note
