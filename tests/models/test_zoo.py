"""The zoo: published parameter counts, and names that take sizes."""

import subprocess
import sys
import time

import pytest

from foreplan import models
from foreplan.base.errors import UsageError
from foreplan.frontend import losses
from foreplan.graph import Graph
from foreplan.graph.value import Kind

# torchvision's and Hugging Face's counts. BERT: 109,482,240 with the pooler of 768·768 + 768, which this model leaves
# out, and a head of 768·768 + 768 (dense) + 2·768 (normalisation) + 30,522 (bias).
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "vgg16": 138_357_544,
    "mobilenet_v2": 3_504_872,
    "efficientnet_b0": 5_288_548,
    "convnext_tiny": 28_589_128,
    "swin_t": 28_288_354,
    "unet": 31_037_698,
    "gpt2_small": 124_439_808,
    "vit_b16": 86_567_656,
    "bert_base": 109_482_240 - 590_592 + 590_592 + 1_536 + 30_522,
    "mixer_b16": 59_880_472,  # timm
    "ddpm_unet": 35_746_307,  # diffusers
    "dlrm": 4_635_985,  # tests/torch/test_zoo.py
    "llama": 1_235_814_400,
    "t5_small": 60_506_624,
    "lstm_lm": 19_780_400,
    "mlp": 784 * 1024 + 1024 + 3 * (1024 * 1024 + 1024) + 1024 * 10 + 10,
    "conv_chain": sum(
        9 * a * b + b for a, b in zip((1, 256, 128, 64, 32, 16, 8, 4, 2), (256, 128, 64, 32, 16, 8, 4, 2, 1))
    ),
}


def parameter_count(graph: Graph) -> int:
    return sum(value.type.size for value in graph.parameters)


@pytest.mark.parametrize("name", models.names())
def test_parameter_counts(name):
    assert parameter_count(models.build(name)) == PUBLISHED[name]


def test_bert_without_its_head():
    graph = models.bert_base()
    encoder = [value for value in graph.parameters if not value.name.startswith("head.")]
    assert sum(value.type.size for value in encoder) == 109_482_240 - 590_592


def test_bert_large_that_classifies():
    graph = models.bert_base(layers=24, width=1024, heads=16, classes=2)
    assert parameter_count(graph) == 335_143_938  # Hugging Face's
    assert graph.outputs["logits"].shape == (8, 2)


@pytest.mark.parametrize("name", models.names())
def test_types(name):
    graph = models.build(name, batch=2)
    (output,) = graph.outputs.values()
    assert all(value.shape[0] == 2 for value in graph.inputs)
    assert output.shape[0] == 2
    trained = losses.attach_loss(graph, models.default_loss(name))
    assert trained.loss is not None
    assert len(trained.inputs) == len(graph.inputs) + (name != "conv_chain")
    assert all(".py:" in node.source and node.source != "" for node in trained.nodes)


@pytest.mark.parametrize("name", ["resnet50", "gpt2_small"])
def test_building_is_fast_and_reads_no_weights(name):
    models.build(name)
    started = time.perf_counter()
    graph = models.build(name)
    assert time.perf_counter() - started < 0.5
    held = [value for value in graph.stored if value.kind is Kind.CONSTANT]
    assert sum(value.type.nbytes for value in held) < 1024


def test_import_is_light():
    heavy = "'scipy', 'llvmlite', 'onnx', 'jax', 'networkx'"
    code = f"import sys, foreplan.models; print([m for m in ({heavy}) if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_with_sizes():
    graph = models.build("resnet18:batch=3,size=64", classes=7)
    assert str(graph.inputs[0].type) == "float32[3,3,64,64]"
    assert str(graph.outputs["logits"].type) == "float32[3,7]"
    assert models.build("mlp:layers=1,width=8", batch=2, width=4).outputs["logits"].shape == (2, 10)
    assert models.default_loss("conv_chain:size=32") == "mean"
    assert models.default_loss("unet") == "cross_entropy"
    assert set(models.describe()) == set(models.names())
    assert "batch=32" in models.describe()["resnet50"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet5", "did you mean 'resnet50'.*conv_chain, mlp"),
        ("nonsense", "The zoo has conv_chain, mlp"),
        ("mlp:depth=3", "no size 'depth'; it has batch=256, width=1024"),
        ("mlp:width", "not a size; write NAME:key=value"),
        ("mlp:width=wide", "width must be a whole number"),
        ("mlp:width=-3", "width must be positive"),
        ("mlp:batch=0", "batch must be positive"),
        ("vgg16:dropout=much", "dropout must be a number"),
        ("unet:size=100", "multiple of 16"),
        ("vgg16:size=100", "multiple of 32"),
        ("vit_b16:size=100", "multiple of the patch"),
        ("mixer_b16:size=100", "multiple of the patch"),
        ("mixer_b16:width=33", "width must be even"),
        ("ddpm_unet:size=20", "multiple of 8"),
        ("ddpm_unet:width=48", "multiple of the groups, 32"),
        ("ddpm_unet:width=9,groups=3", "must be even"),
        ("dlrm:hidden=100", "multiple of 8"),
        ("efficientnet_b0:width=0.0", "width is a factor above 0"),
        ("convnext_tiny:size=31", "at least 32"),
        ("swin_t:size=3", "at least the patch, 4"),
        ("swin_t:heads=5", "multiple of heads, 5"),
        ("llama:heads=3", "width must be a multiple of 2·heads, 6, and is 2048"),
        ("llama:kv_heads=5", "kv_heads must divide heads, 32, and is 5"),
        ("llama:tied=no", "tied must be 0 or 1, and is 'no'"),
        ("llama:stretch=0", "stretch"),
        ("llama:base=0", "base"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(UsageError, match=message):
        models.build(name)


@pytest.mark.parametrize(("name", "last"), [("efficientnet_b0", 14 / 16), ("convnext_tiny", 1), ("swin_t", 1)])
def test_the_share_of_dropped_branches_grows(name, last):
    nodes = [node.op for node in models.build(name, stochastic_depth=0.25).nodes if node.op.name == "dropout"]
    ratios = [op.ratio for op in nodes]
    assert all(op.whole_items for op in nodes)
    assert ratios == sorted(ratios) and ratios[0] > 0 and ratios[-1] == pytest.approx(0.25 * last)
