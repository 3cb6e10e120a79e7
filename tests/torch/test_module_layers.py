"""Layers and functions with options that their authors rarely set, beside PyTorch: training, and inference after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402
from torch.nn import utils  # noqa: E402
from torch.nn.utils import parametrizations, prune  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.base.errors import UnsupportedError  # noqa: E402
from tests.profile import few  # noqa: E402
from tests.torch.beside import Squares, assert_trains_as_pytorch, feeds  # noqa: E402


class Calls(nn.Module):
    """A function of a trained tensor and the inputs, or of the inputs times a trained number."""

    def __init__(self, fn: Callable[..., Any], shape: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.fn = fn
        self.weight = nn.Parameter(torch.randn(shape) if shape else torch.tensor(1.3))
        self.is_weight_given = shape is not None

    def forward(self, *args: Any) -> Any:
        """What it gives."""
        if self.is_weight_given:
            return self.fn(self.weight, *args)
        return self.fn(*(x * self.weight if x.is_floating_point() else x for x in args))


class Layer(nn.Module):
    """A layer behind a trained number."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.factor = layer, nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Any, *more: Any) -> Any:
        """What it gives."""
        return self.layer(x * self.factor if x.is_floating_point() else x, *more)


class Unpooled(nn.Module):
    """Pooled, and back to where each came from."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.back = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Any) -> Any:
        """Images."""
        y, places = self.pool(self.conv(x))
        return self.back(torch.tanh(y), places)


class Attends(nn.Module):
    """Attention with both masks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Any) -> Any:
        """[2, 5, 8], and the weights."""
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        above = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
        return self.inner(x, x, x, key_padding_mask=padding, attn_mask=above)


def pruned() -> nn.Module:
    """A layer whose smallest weights are none."""
    return prune.l1_unstructured(nn.Linear(6, 5), "weight", 0.4)


X = torch.randn
IDS = torch.randint(0, 9, (3, 5), generator=torch.Generator().manual_seed(0))
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "conv1d, reflect": (
        lambda: nn.Conv1d(4, 6, 3, padding=2, dilation=2, groups=2, padding_mode="reflect"),
        (X(2, 4, 11),),
    ),
    "conv2d, replicate": (lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), padding_mode="replicate"), (X(2, 4, 9, 8),)),
    "conv3d, circular": (lambda: nn.Conv3d(2, 3, 2, padding=1, padding_mode="circular"), (X(2, 2, 4, 5, 4),)),
    "conv2d, same": (lambda: nn.Conv2d(3, 4, 4, padding="same", dilation=2), (X(2, 3, 9, 8),)),
    "conv2d, one image": (lambda: nn.Conv2d(3, 4, 3), (X(3, 9, 8),)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, groups=2, dilation=2), (X(2, 4, 7),)),
    "max pool, dilated": (lambda: Layer(nn.MaxPool2d(3, 2, 1, dilation=2, ceil_mode=True)), (X(2, 3, 10, 9),)),
    "mean pool without padding": (lambda: Layer(nn.AvgPool2d(3, 2, 1, True, False)), (X(2, 3, 10, 9),)),
    "mean pool, divisor": (lambda: Layer(nn.AvgPool2d(3, 2, 1, True, False, 5)), (X(2, 3, 10, 9),)),
    "norm pool": (lambda: Layer(nn.LPPool2d(2, 3, 2, ceil_mode=True)), (X(2, 3, 10, 9),)),
    "adaptive": (lambda: Layer(nn.AdaptiveMaxPool2d((4, 3))), (X(2, 3, 10, 9),)),
    "unpooled": (Unpooled, (X(2, 3, 8, 8),)),
    "shuffled": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.PixelShuffle(2), nn.ChannelShuffle(2)), (X(2, 3, 5, 6),)),
    "unfold": (lambda: Layer(nn.Unfold((3, 2), 2, (1, 0), (2, 1))), (X(2, 3, 10, 9),)),
    "fold": (lambda: Layer(nn.Fold((6, 5), (3, 2), padding=1, stride=(2, 1))), (X(2, 12, 18),)),
    "pads": (
        lambda: Layer(nn.Sequential(nn.ZeroPad2d((1, -1, 2, 0)), nn.CircularPad2d((1, 2, 3, 0)))),
        (X(2, 3, 6, 7),),
    ),
    "reflected": (
        lambda: Layer(nn.Sequential(nn.ReflectionPad2d((2, 1, 0, 3)), nn.ReplicationPad2d(2))),
        (X(2, 3, 6, 7),),
    ),
    "bicubic": (lambda: Layer(nn.Upsample(scale_factor=(1.5, 2), mode="bicubic")), (X(2, 3, 6, 7),)),
    "aligned": (lambda: Layer(nn.Upsample(size=(7, 13), mode="bilinear", align_corners=True)), (X(2, 3, 6, 7),)),
    "local response": (lambda: Layer(nn.LocalResponseNorm(4, 0.1, 0.6, 2.0)), (X(2, 6, 5, 5),)),
    "norms": (lambda: Layer(nn.Sequential(nn.RMSNorm([7]), nn.LayerNorm([6, 7], bias=False))), (X(2, 3, 6, 7),)),
    "batch norm without weights": (
        lambda: Layer(nn.BatchNorm2d(3, affine=False, track_running_stats=False)),
        (X(4, 3, 6, 7),),
    ),
    "lstm, projected": (lambda: nn.LSTM(4, 6, 2, proj_size=3, bidirectional=True), (X(5, 2, 4),)),
    "gru": (lambda: nn.GRU(4, 5, 2, bidirectional=True, batch_first=True), (X(2, 6, 4),)),
    "rnn": (lambda: nn.RNN(4, 5, nonlinearity="relu", bias=False), (X(6, 4),)),
    "lstm cell": (lambda: nn.LSTMCell(4, 5, bias=False), (X(2, 4),)),
    "gru cell": (lambda: nn.GRUCell(4, 5), (X(2, 4),)),
    "rnn cell": (lambda: nn.RNNCell(4, 5, nonlinearity="relu"), (X(2, 4),)),
    "attention": (Attends, (X(2, 5, 8),)),
    "attention, more keys": (lambda: Attends(add_bias_kv=True, add_zero_attn=True), (X(2, 5, 8),)),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0), (X(5, 2, 8), X(4, 2, 8))),
    "bag of the largest": (lambda: nn.EmbeddingBag(9, 4, mode="max", padding_idx=2), (IDS,)),
    "bag of means": (lambda: nn.EmbeddingBag(9, 4, mode="mean", padding_idx=-1), (IDS,)),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5), (X(2, 6, 3), X(2, 6, 4))),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3), dim=1), (X(5, 4),)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)), (X(2, 3, 5, 5),)),
    "spectral norm, hook": (lambda: utils.spectral_norm(nn.Linear(4, 3)), (X(5, 4),)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), (X(5, 4),)),
    "orthogonal, reflections": (lambda: parametrizations.orthogonal(nn.Linear(4, 3)), (X(5, 4),)),
    "pruned": (pruned, (X(5, 6),)),
    **{
        repr(each): (lambda each=each: Layer(nn.Sequential(nn.Linear(6, 6), copy.deepcopy(each))), (X(4, 3, 6),))
        for each in (
            *(nn.ELU(0.7), nn.Hardshrink(0.3), nn.Hardsigmoid(), nn.Hardtanh(-0.5, 0.8), nn.LeakyReLU(-0.2)),
            *(nn.LogSigmoid(), nn.PReLU(3), nn.ReLU6(), nn.SELU(), nn.CELU(0.4), nn.GELU("tanh"), nn.Mish()),
            *(nn.Softplus(0.5, 3), nn.Softshrink(0.2), nn.Softsign(), nn.Tanhshrink(), nn.Threshold(0.1, -2)),
            *(nn.GLU(2), nn.Softmin(2), nn.Softmax2d(), nn.Hardswish(inplace=True), nn.Threshold(0.1, 2, inplace=True)),
        )
    },
}


def assigned(y: Any) -> Any:
    """Written by slices, by places, and where a mask holds."""
    y = y.clone()
    y[1:3, ::2] = y[0:2, ::2] * 2
    y[..., -1] += 3
    y[[0, 2]] = 0.5
    y[y > 1] = 0.0
    return y


def masked(y: Any) -> Any:
    """Rows and elements of masks that are known."""
    y, rows = y.clone(), torch.tensor([True, False, True, False])
    y[rows] = torch.arange(10.0).reshape(2, 5) * y[rows]
    y[torch.arange(20).reshape(4, 5) % 3 == 0] *= 2
    return y


def copied(w: Any, x: Any) -> Any:
    """Into a tensor of zeros, through views of it."""
    found = torch.zeros(5, 5)
    found[:4].copy_(w)
    found[4] = x[0]
    found.view(-1)[::6] = 1
    return found


def hard(y: Any) -> Any:
    """One of each row, with the gradient of shares."""
    shares = y.softmax(-1)
    one = torch.zeros_like(shares).scatter_(-1, shares.argmax(-1, keepdim=True), 1.0)
    return one - shares.detach() + shares


def filtered(y: Any) -> Any:
    """Some frequencies, by factors that are written into a tensor of zeros."""
    given = torch.fft.rfft(y)
    kept = torch.zeros(4, 3, dtype=torch.complex64)
    kept[:, :2] = given[:, :2] * (2 + 1j)
    return torch.fft.irfft(kept, n=5)


PLACES = torch.tensor([[0, 1], [2, 3], [4, 0], [1, 1]])
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "assigned": lambda w, x: assigned(w * x),
    "masked": lambda w, x: masked(w * x),
    "copied": copied,
    "one of each row": lambda w, x: hard(w * x),
    "filtered": lambda w, x: filtered(w * x),
    "chain in place": lambda w, x: torch.add(w, x).mul_(2).sub_(1).clamp_(-1, 1).pow_(2),
    "masked_fill_": lambda w, x: (w * x).masked_fill_(x > 0, -1.0),
    "masked_scatter": lambda w, x: w.masked_scatter(x > 0, (w * x).flatten().flip(0)),
    "scatter_": lambda w, x: (w * x).scatter_(1, PLACES[:, :1], 2.0).scatter_add_(1, PLACES, w[:, :2]),
    "index_put_": lambda w, x: (w * x).index_put_((PLACES[:, 0] % 4, PLACES[:, 1]), torch.ones(4), accumulate=True),
    "diagonal": lambda w, x: (w @ x.T).fill_diagonal_(0.0) + torch.einsum("ii->i", w @ x.T),
    "products": lambda w, x: torch.einsum("...j,j", w, x[0]) + torch.kron(w[:2, :2], x[:2, :2]).sum(1),
    "norms": lambda w, x: torch.linalg.norm(w * x) + torch.linalg.vector_norm(w, 3, -1).sum() + w.norm(float("inf"), 0),
    "order": lambda w, x: (w * x).sort(-1, True)[0][:, :2] + (w * x).topk(2, 1, False)[0] + (w * x).median(1, True)[0],
    "whole numbers": lambda w, x: w * ((x * 3).long() // 2 % 3) + w * (x.round().int() << 1),
    "counts": lambda w, x: w * torch.bincount(torch.tensor([0, 1, 1, 4])) + w * torch.histc(x, 5),
    "repeated": lambda w, x: (w * x).repeat(2, 1).repeat_interleave(torch.tensor([1, 0, 2, 1, 1, 1, 1, 2]), 0),
    "number of data": lambda w, x: w * (x.abs().max().item() + 1),
    "determinant": lambda w, x: torch.slogdet(w @ w.T + 3 * torch.eye(4))[1] + torch.matrix_exp(w @ w.T * 0.1).trace(),
    "windows": lambda w, x: (w * x).unfold(1, 3, 2).mean(-1).unsqueeze_(0),
    "special": lambda w, x: torch.logaddexp(w, x) + torch.special.entr(w.abs() + 0.1) + torch.xlogy(w.abs(), x.abs()),
}


@pytest.mark.parametrize("name", few(list(LAYERS), (1, 11, 24)))
def test_layers_train_and_infer_as_in_pytorch(name: str) -> None:
    make, args = LAYERS[name]
    torch.manual_seed(1)
    ours = make()
    assert_alike(ours, args)


@pytest.mark.parametrize("name", few(list(FUNCTIONS), (0, 1, 4)))
def test_functions_train_and_infer_as_in_pytorch(name: str) -> None:
    torch.manual_seed(1)
    assert_alike(Calls(FUNCTIONS[name], (4, 5)), (torch.randn(4, 5),))


def assert_alike(ours: nn.Module, args: tuple[Any, ...]) -> None:
    """Three steps, and then the same number in evaluation mode."""
    theirs = copy.deepcopy(ours) if not hasattr(ours, "weight_mask") else _twin(ours)
    session = assert_trains_as_pytorch(ours, theirs, args)
    graph = fp.from_torch(Squares(ours), *args)
    (found,) = fp.compile(graph, target="numpy").bind(share=session).step(feeds(graph, args, {})).outputs.values()
    with torch.no_grad():
        assert found == pytest.approx(Squares(theirs).eval()(*args).item(), rel=1e-5)


def _twin(module: nn.Module) -> nn.Module:
    """A pruned layer again, which cannot be copied."""
    made = pruned()
    made.load_state_dict(module.state_dict())
    return made


def test_lines_are_those_of_the_users_own_code() -> None:
    graph = fp.from_torch(Layer(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), torch.randn(2, 4))
    assert {node.source.partition(":")[0] for node in graph.nodes} == {"test_module_layers.py"}
    graph = fp.from_torch(Calls(copied, (4, 5)), torch.randn(4, 5))  # in a function that `forward` calls
    first = copied.__code__.co_firstlineno
    assert {node.source for node in graph.nodes} <= {f"test_module_layers.py:{first + i}" for i in range(7)}


def test_what_has_no_graph_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match=r"ATen op linalg_qr.* \(the module itself, test_module_layers\.py:\d+\)"
    ):
        fp.from_torch(Calls(lambda w, x: torch.linalg.qr(w * x)[0], (4, 5)), torch.randn(4, 5))
    with pytest.raises(UnsupportedError, match=r"view_as_real"):
        fp.from_torch(Calls(lambda w: w, (2,)).to(torch.complex64))
