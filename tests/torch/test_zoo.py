"""Models of the zoo beside those of other packages, or of the paper: outputs and gradients, with the same weights."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402

from foreplan import models  # noqa: E402
from foreplan.graph import parse_graph  # noqa: E402
from foreplan.models.efficientnet import STAGES  # noqa: E402
from foreplan.models.llama import frequencies  # noqa: E402
from foreplan.models.t5 import position_buckets  # noqa: E402
from tests.torch.zoo import beside, drawn  # noqa: E402


def peer(module: str) -> Any:
    """A module of another package."""
    return pytest.importorskip(module, reason=f"{module.partition('.')[0]} is not installed: make setup-torch")


def images(*shape: int, seed: int = 2) -> dict[str, np.ndarray]:
    return {"images": np.random.default_rng(seed).standard_normal(shape).astype(np.float32)}


@pytest.mark.parametrize("size", [64, 39])
def test_convnext(size: int, tmp_path: Path) -> None:
    """Also where the strides do not divide the extents."""
    theirs = peer("torchvision.models.convnext")
    widths = (8, 16, 32, 64, None)
    stages = [theirs.CNBlockConfig(*pair, count) for *pair, count in zip(widths, widths[1:], (1, 1, 3, 1))]
    module = drawn(theirs.ConvNeXt(stages, num_classes=5))
    graph = models.convnext_tiny(batch=2, size=size, blocks=1, classes=5, width=8)
    beside(graph, module, lambda m, x: m(x), images(2, 3, size, size), np.array([1, 4]), tmp_path)


def test_efficientnet(tmp_path: Path) -> None:
    """In float64: the gradient of a bias in front of a batch norm is 0 but for rounding."""
    theirs = peer("torchvision.models.efficientnet")
    config = partial(theirs.MBConvConfig, width_mult=0.25, depth_mult=0.3)
    before = (32, *(channels for *_, channels, _ in STAGES))
    stages = [config(up, kernel, stride, n, m, blocks) for (up, kernel, stride, m, blocks), n in zip(STAGES, before)]
    module = drawn(theirs.EfficientNet(stages, dropout=0.0, stochastic_depth_prob=0.0, num_classes=5)).double()
    graph = models.efficientnet_b0(batch=2, size=64, classes=5, width=0.25, depth=0.3)
    graph = parse_graph(graph.as_text().replace("float32", "float64"))
    inputs = {"images": np.random.default_rng(2).standard_normal((2, 3, 64, 64))}
    beside(graph, module, lambda m, x: m(x), inputs, np.array([1, 4]), tmp_path)


@pytest.mark.parametrize("size", [24, 21])
def test_swin(size: int, tmp_path: Path) -> None:
    """Also where windows do not divide the extents, and where these are odd."""
    theirs = peer("torchvision.models.swin_transformer")
    depths, heads = [1, 1, 3, 1], [1, 2, 4, 8]
    module = theirs.SwinTransformer([1, 1], 8, depths, heads, [3, 3], stochastic_depth_prob=0.0, num_classes=5)
    graph = models.swin_t(batch=2, size=size, blocks=1, classes=5, width=8, heads=1, window=3, patch=1)
    inputs, target = images(2, 3, size, size), np.array([1, 4])
    beside(graph, drawn(module), lambda m, x: m(x), inputs, target, tmp_path, strict=False)


@pytest.mark.parametrize(
    ("module", "name", "ours"),
    [
        ("convnext", "convnext_tiny", models.convnext_tiny),
        ("efficientnet", "efficientnet_b0", models.efficientnet_b0),
        ("swin_transformer", "swin_t", models.swin_t),
    ],
)
def test_the_published_model(module: str, name: str, ours: Any) -> None:
    """Names and shapes of all weights and running statistics. Swin's index of relative positions is a constant here."""
    state = getattr(peer(f"torchvision.models.{module}"), name)().state_dict()
    graph = ours()
    found = graph.parameters if name == "swin_t" else graph.stored
    assert {value.name: value.shape for value in found} == {
        key: tuple(value.shape)
        for key, value in state.items()
        if not key.endswith(("relative_position_index", "num_batches_tracked"))
    }


def test_mixer(tmp_path: Path) -> None:
    sizes = {"num_classes": 5, "img_size": 24, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}
    module = drawn(peer("timm.models.mlp_mixer").MlpMixer(**sizes))
    graph = models.mixer_b16(batch=3, size=24, layers=2, classes=5, width=32, patch=8)
    target = np.random.default_rng(0).integers(0, 5, 3)
    beside(graph, module, lambda m, x: m(x), images(3, 3, 24, 24, seed=1), target, tmp_path)


def test_ddpm_unet(tmp_path: Path) -> None:
    """Of google/ddpm-cifar10-32, but for the widths, the groups and the extent."""
    module = peer("diffusers").UNet2DModel(
        block_out_channels=(8, 16, 16, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=None,
        downsample_padding=0,
        flip_sin_to_cos=False,
        freq_shift=1,
        layers_per_block=2,
        norm_eps=1e-6,
        norm_num_groups=4,
        sample_size=16,
    )
    given, noise = np.random.default_rng(1).standard_normal((2, 2, 3, 16, 16)).astype(np.float32)
    graph = models.ddpm_unet(batch=2, size=16, width=8, groups=4)
    inputs = {"images": given, "timesteps": np.array([3, 987])}
    beside(graph, drawn(module), lambda m, x, t: m(x, t).sample, inputs, noise, tmp_path, "mse")


LLAMA: dict[str, Any] = {"layers": 2, "width": 48, "features": 80, "vocabulary": 50, "heads": 6}


def llama(kv_heads: int, tied: bool, rope: dict[str, Any]) -> tuple[Any, Any]:
    """The module of transformers, and a configuration."""
    modeling = peer("transformers.models.llama.modeling_llama")
    sizes = {"vocab_size": 50, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": kv_heads}
    config = modeling.LlamaConfig(**sizes, **heads, rms_norm_eps=1e-5, tie_word_embeddings=tied, rope_parameters=rope)
    return modeling, config


def stretched(factor: float) -> dict[str, Any]:
    further = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **further}


@pytest.mark.parametrize("kv_heads,tied", [(2, True), (6, False)])
def test_llama(kv_heads: int, tied: bool, tmp_path: Path) -> None:
    rope = stretched(32.0) if tied else {"rope_type": "default", "rope_theta": 10000.0}
    modeling, config = llama(kv_heads, tied, rope)
    base, stretch = rope["rope_theta"], rope.get("factor", 1.0)
    graph = models.llama(batch=2, seq=11, kv_heads=kv_heads, tied=tied, base=base, stretch=stretch, **LLAMA)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 12))
    module, inputs = drawn(modeling.LlamaForCausalLM(config)), {"tokens": tokens[:, :-1].copy()}
    beside(graph, module, lambda m, x: m(x).logits, inputs, tokens[:, 1:].copy(), tmp_path)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_of_llama_3(factor: float) -> None:
    modeling, config = llama(6, True, stretched(factor))
    config.head_dim = 64
    wanted = modeling.LlamaRotaryEmbedding(config).inv_freq.numpy()
    np.testing.assert_allclose(frequencies(64, 500000.0, factor), wanted, rtol=1e-5)


def test_t5(tmp_path: Path) -> None:
    modeling = peer("transformers.models.t5.modeling_t5")
    config = modeling.T5Config(
        vocab_size=40, d_model=24, d_kv=10, d_ff=56, num_layers=2, num_heads=3, dropout_rate=0.0, use_cache=False
    )
    module = drawn(modeling.T5ForConditionalGeneration(config))
    sizes = {"layers": 2, "width": 24, "heads": 3, "depth": 10, "features": 56, "vocabulary": 40}
    graph = models.t5_small(batch=2, seq=37, decoder_seq=20, **sizes)
    rng = np.random.default_rng(0)
    inputs = {"tokens": rng.integers(0, 40, (2, 37)), "decoder_tokens": rng.integers(0, 40, (2, 20))}
    target = rng.integers(0, 40, (2, 20))
    target[1, 15:] = -100
    beside(graph, module, lambda m, x, y: m(input_ids=x, decoder_input_ids=y).logits, inputs, target, tmp_path)


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_of_t5(causal: bool) -> None:
    attention = peer("transformers.models.t5.modeling_t5").T5Attention
    distance = torch.arange(600)[None, :] - torch.arange(600)[:, None]
    wanted = attention._relative_position_bucket(distance, bidirectional=not causal)
    assert (position_buckets(600, 600, causal) == wanted.numpy()).all()


def test_lstm_lm(tmp_path: Path) -> None:
    parts = {"encoder": nn.Embedding(30, 12), "rnn": nn.LSTM(12, 12, 2, batch_first=True), "decoder": nn.Linear(12, 30)}
    module = drawn(nn.ModuleDict(parts))
    graph = models.lstm_lm(batch=3, seq=7, width=12, vocabulary=30)
    tokens = np.random.default_rng(0).integers(0, 30, (3, 8))

    def logits(m: Any, x: Any) -> Any:
        return m["decoder"](m["rnn"](m["encoder"](x))[0])

    beside(graph, module, logits, {"tokens": tokens[:, :-1].copy()}, tokens[:, 1:].copy(), tmp_path)


def perceptron(*widths: int) -> Any:
    """Linear layers with a ReLU behind each."""
    layers: list[Any] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """`DLRM_Net` of dlrm_s_pytorch.py with the interaction "dot", up to the last sigmoid."""

    def __init__(self, dense: int, tables: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bot_l = perceptron(dense, hidden, hidden // 2, hidden // 8, width)
        self.top_l = perceptron(width + (tables + 1) * tables // 2, hidden, hidden // 2, 1)[:-1]

    def forward(self, dense: Any, categories: Any) -> Any:
        """Logits."""
        offsets = torch.arange(len(dense))
        x = self.bot_l(dense)
        rows = [table(categories[:, i], offsets) for i, table in enumerate(self.emb_l)]
        vectors = torch.cat([x, *rows], 1).view(len(dense), -1, x.shape[1])
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        count = vectors.shape[1]
        first = torch.tensor([i for i in range(count) for _ in range(i)])
        second = torch.tensor([j for i in range(count) for j in range(i)])
        return self.top_l(torch.cat([x, products[:, first, second]], 1))


def test_dlrm(tmp_path: Path) -> None:
    sizes = {"dense": 4, "tables": 5, "rows": 30, "width": 8, "hidden": 32}
    rng = np.random.default_rng(1)
    inputs = {"dense": rng.standard_normal((6, 4)).astype(np.float32), "categories": rng.integers(0, 30, (6, 5))}
    target = rng.integers(0, 2, (6, 1)).astype(np.float32)
    graph = models.dlrm(batch=6, **sizes)
    beside(graph, drawn(DLRM(**sizes)), lambda m, x, c: m(x, c), inputs, target, tmp_path, "binary_cross_entropy")


def test_the_default_sizes_of_dlrm() -> None:
    with torch.device("meta"):
        module = DLRM(13, 26, 10_000, 16, 512)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    graph = models.dlrm()
    assert {value.name: value.shape for value in graph.parameters} == shapes
    assert sum(value.type.size for value in graph.parameters) == 4_635_985
