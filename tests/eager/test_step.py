"""Whole models: figures that PyTorch 2.13 was measured at, and what variants of a training loop change."""

from __future__ import annotations

from typing import Any

import pytest

import foreplan as fp
from foreplan.base.errors import UnsupportedError, UsageError
from foreplan.eager import Eager, Variant, as_pytorch
from foreplan.frontend import nn, spec, trace
from foreplan.frontend.tracing.elementwise import apply
from foreplan.ops.expr import erf
from tests.eager.measured import MEASURED

MIB = 2**20


def counted(name: str, by: str = "cross_entropy", **variant: Any) -> Eager:
    return as_pytorch(fp.models.build(name), by, fp.optim.Nesterov(0.1), Variant(**variant))


@pytest.mark.parametrize("name", MEASURED)
def test_peaks_that_were_measured(name: str) -> None:
    loss = "mean" if name == "conv_chain" else "cross_entropy"
    assert counted(name, loss).peak / MIB == pytest.approx(MEASURED[name], rel=0.001)


def test_the_question_that_began_it() -> None:
    """A chain of nine convolutions, MiB at four points. The transforms of cuDNN's Winograd engine for one gradient take
    36 numbers of each tile of 4 × 4 elements of 256 + 128 channels, and of each pair of channels: 3,460.5 MiB.
    """
    free = counted("conv_chain", "mean", workspace=36 * 4 * (256 * 256 * (256 + 128) + 256 * 128)).phases
    capped = counted("conv_chain", "mean").phases
    assert [phase.live // MIB for phase in free[:2]] == [4, 5]
    assert [phase.most // MIB for phase in free[2:4]] == [2049, 6027]
    assert round(max(phase.most for phase in capped) / MIB) == 2569


def test_bert_large_as_hugging_face_measured_it() -> None:
    """14,949 MB of a card, 1,343 of them before the model: 4 sequences of 512 tokens, AdamW. Attention and GELU were
    written out, and `zero_grad` kept gradients.
    """
    model = fp.models.bert_base(4, 512, 24, 1024, 16, dropout=0.1, attention_dropout=0.1, classes=2)
    variant = Variant(attention="eager", gelu="parts", zero="keep")
    eager = as_pytorch(model, "cross_entropy", fp.optim.AdamW(1e-4), variant, cuda=True)
    assert eager.replayed[-1].reserved / MIB + 1343 == pytest.approx(14949, rel=0.05)


@pytest.mark.parametrize(("tokens", "measured"), [(8, 458), (32, 462), (128, 488), (512, 728)])
def test_bert_base_after_its_forward_pass_as_hugging_face_measured_it(tokens: int, measured: int) -> None:
    """MB for 8 sequences without history, of the cased vocabulary; attention was written out."""
    model = fp.models.bert_base(8, tokens, vocabulary=28996, classes=2)
    eager = as_pytorch(model, None, None, Variant(grad="off", attention="eager"), cuda=True)
    assert eager.replayed[-1].reserved / MIB == pytest.approx(measured, rel=0.05)


SMALL = "resnet18:batch=2,size=32"


def test_gradients_that_are_zeroed_stay_through_the_forward_pass() -> None:
    plain, kept = counted(SMALL).phases, counted(SMALL, zero="keep").phases
    trained = sum(value.type.nbytes for value in fp.models.build(SMALL).parameters)
    assert [phase.name for phase in plain[5:8]] == ["forward", "backward", "step"]
    assert kept[5].live - plain[5].live == trained
    assert kept[2].live == plain[2].live  # the first step has none yet


def test_a_loss_that_is_kept_is_four_bytes_each_step() -> None:
    plain, kept = counted(SMALL).phases, counted(SMALL, loss="kept").phases
    assert [b.live - a.live for a, b in zip(plain[4::3], kept[4::3])] == [0, 4, 8]


def test_an_evaluation_with_history_keeps_all_of_it_with_the_loss() -> None:
    off = counted(SMALL, grad="off").phases
    once = counted(SMALL, grad="unused").phases
    growing = counted(SMALL, grad="unused", loss="kept").phases
    history = once[2].live - once[1].live
    assert history > 0 and off[2].live == off[1].live + 4
    assert [phase.live - growing[1].live for phase in growing[2:]] == [history, 2 * history, 3 * history]


def test_an_output_that_is_kept_is_there_when_the_step_is_over() -> None:
    plain, kept = counted("conv_chain:size=64", "mean"), counted("conv_chain:size=64", "mean", output="kept")
    assert kept.phases[4].live - plain.phases[4].live == 64 * 64 * 4


def test_gradients_in_buffers_of_their_own_all_live_at_the_peak() -> None:
    """At the second convolution: its input, the gradients of all outputs, and of all weights but the first."""
    freed, kept = counted("conv_chain:size=64", "mean"), counted("conv_chain:size=64", "mean", gradients="kept")
    weights = fp.models.build("conv_chain:size=64").parameters
    trained = sum(value.type.nbytes for value in weights[2:])
    channels = 256 + sum((256, 128, 64, 32, 16, 8, 4, 2, 1))
    assert kept.phases[3].most == kept.phases[1].live + channels * 64 * 64 * 4 + trained + 2 * 4
    assert [phase.live for phase in kept.phases] == [phase.live for phase in freed.phases]


def test_adam_keeps_two_tensors_and_foreach_holds_one_more_for_a_moment() -> None:
    graph = fp.models.build("mlp:width=64,layers=1,batch=4")
    trained = sum(value.type.nbytes for value in graph.parameters)
    found = as_pytorch(graph, "cross_entropy", fp.optim.Adam(1e-3), Variant(optimizer="foreach"), True).phases
    assert found[4].live - found[3].live == 2 * trained
    assert found[7].most - found[7].live == trained


def test_a_frozen_backbone_saves_nothing_and_has_no_gradients() -> None:
    graph = fp.models.build(SMALL)
    whole = fp.compile(graph, "cross_entropy", fp.optim.SGD(0.1)).as_pytorch().eager
    head = fp.compile(graph, "cross_entropy", fp.optim.SGD(0.1), freeze=["*"], train=["fc"]).as_pytorch().eager
    assert head.phases[2].live - head.phases[1].live < 0.02 * (whole.phases[2].live - whole.phases[1].live)
    assert head.phases[3].live - head.phases[1].live < 1000 * 513 * 4 + 64


def test_gelu_is_one_op_however_it_is_written() -> None:

    def as_onnx_has_it(x: Any) -> Any:
        y = nn.linear(x, 8, name="a")
        return nn.linear((y * (apply("erf", erf, y / 2.0**0.5) + 1.0)) * 0.5, 8, name="b")

    def as_a_layer(x: Any) -> Any:
        return nn.linear(nn.gelu(nn.linear(x, 8, name="a")), 8, name="b")

    forms = [trace(model, spec((4, 8))) for model in (as_onnx_has_it, as_a_layer)]
    a, b = (as_pytorch(graph, "mse", None, Variant()).phases for graph in forms)
    assert [(phase.live, phase.most) for phase in a] == [(phase.live, phase.most) for phase in b]


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(UnsupportedError, match=r"lstm\.py.*recurrent layers"):
        as_pytorch(fp.models.build("lstm_lm"), "cross_entropy", None, Variant())
    with pytest.raises(UsageError, match="Lion in PyTorch is not known"):
        as_pytorch(fp.models.build(SMALL), "cross_entropy", fp.optim.Lion(), Variant())
    with pytest.raises(UsageError, match=r"no operation of the model is in 'layer9'; there are .*layer"):
        counted(SMALL, checkpoint=["layer9"])


def test_a_checkpointed_part_is_one_stretch() -> None:
    def model(x: Any) -> Any:
        for scope in ("a", "b", "a"):
            with nn.scope(scope):
                x = nn.relu(x)
        return x

    with pytest.raises(UsageError, match="'a' is not one stretch of the model"):
        as_pytorch(trace(model, spec((4, 8))), "mean", None, Variant(checkpoint=["a"]))


def test_options_of_variants_are_checked() -> None:
    with pytest.raises(UsageError, match="zero"):
        Variant(zero="sometimes")
    with pytest.raises(UsageError, match="much"):
        Variant(workspace="much")


def test_attention_and_gelu_as_they_are_written() -> None:
    """Of one layer: what is kept until backward beside the usual."""
    name = "bert_base:batch=2,seq=32,layers=1,width=64,heads=4,vocabulary=50"
    kept = {how: counted(name, **dict([how.split("=")])).phases[2].live for how in (
        "attention=flash", "attention=math", "attention=eager", "gelu=fused", "gelu=parts")}  # fmt: skip
    scores, rows, wide = 4 * 2 * 4 * 32 * 32, 4 * 2 * 4 * 32, 4 * 2 * 32 * 4 * 64
    assert kept["attention=eager"] - kept["attention=flash"] == scores - rows  # probabilities, and no sums
    assert (
        kept["attention=math"] == kept["attention=eager"]
    )  # scaled queries and keys in the place of those that are not
    # x · (1 + erf(x / √2)) / 2 keeps both factors and what erf takes, instead of x. The head has a GELU of its own.
    assert kept["gelu=parts"] - kept["gelu=fused"] == 2 * (wide + wide // 4)
