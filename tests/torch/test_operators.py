"""Every op of PyTorch's own suite, and those that draw, beside PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
pytest.importorskip("expecttest", reason="what PyTorch's own suite needs is not installed: make setup-torch")

from torch import nn  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.base.errors import ModelError, UnsupportedError  # noqa: E402
from tests.profile import few, pick  # noqa: E402
from tests.torch.operators import TIED, faults, is_judged, name_of, samples  # noqa: E402

OPS = {name_of(info): info for info in op_db if is_judged(info)}
# How many samples of an op are judged where all are: narrow types differ from wide ones in little but how they round.
DTYPES = {
    **dict.fromkeys((torch.float64, torch.float32, torch.int64, torch.bool), 40),
    **dict.fromkeys((torch.bfloat16, torch.float16, torch.complex64), 6),
}
# Each had a fault once, or stands for a family.
USUAL = (
    *(
        "add",
        "cummax",
        "diff",
        "fft.irfft2",
        "index_put",
        "kthvalue",
        "lgamma",
        "linalg.slogdet",
        "masked_scatter",
        "searchsorted",
        "stft",
    ),
    *("cholesky_solve", "linalg.cholesky", "linalg.inv", "linalg.solve", "linalg.solve_triangular"),
    *("pow", "scatter_reduce.mean", "tensordot", "topk", "torch.ops.aten._safe_softmax.default", "var_mean"),
    "nn.functional.cosine_similarity",
    *("nn.functional.embedding_bag", "nn.functional.hinge_embedding_loss", "nn.functional.max_unpool2d"),
    *("nn.functional.pad.replicate_negative", "nn.functional.softplus", "nn.functional.upsample_bilinear"),
)


@pytest.mark.parametrize("name", few(list(OPS), [i for i, name in enumerate(OPS) if name in USUAL]))
@pytest.mark.parametrize("dtype", few(list(DTYPES)))
def test_ops_are_right_or_refused(name: str, dtype: torch.dtype) -> None:
    info = OPS[name]
    if dtype not in info.dtypes:
        pytest.skip(f"PyTorch has no {name} of {dtype}")
    if name in TIED and dtype not in (torch.float32, torch.float64):
        pytest.skip("which of equal numbers stands where is chance")
    given = samples(info, dtype, pick(2, 4, DTYPES[dtype]))
    found: list[str] = []
    try:
        found += faults(info, given)
    except (UnsupportedError, ModelError):  # one of them; each by itself then
        for sample in given:
            try:
                found += [f"{problem}, of {sample.summary()}" for problem in faults(info, [sample])]
            except (UnsupportedError, ModelError) as error:
                known = isinstance(error, UnsupportedError) or "PyTorch cannot export" in str(error)
                if not known or "with these arguments" in str(error):
                    found.append(f"{error}, of {sample.summary()}")
    assert not found


class Drawing(nn.Module):
    """Numbers drawn into a tensor of an input's shape."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Any) -> Any:
        """What is drawn."""
        return self.draw(x)


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
DRAWS: dict[str, Callable[[Any], Any]] = {
    "uniform": lambda x: x.clone().uniform_(-1, 3),
    "normal": lambda x: x.clone().normal_(1, 2),
    "exponential": lambda x: x.clone().exponential_(2.0),
    "geometric": lambda x: x.clone().geometric_(0.3),
    "cauchy": lambda x: x.clone().cauchy_(1, 2),
    "log-normal": lambda x: x.clone().log_normal_(0, 0.5),
    "integers": lambda x: torch.randint_like(x, -2, 5),
    "permutation": lambda x: torch.randperm(x.numel()).reshape(x.shape).float(),
    "bernoulli": lambda x: torch.bernoulli(x * 0 + 0.3),
    "multinomial": lambda x: torch.multinomial(WEIGHTS.expand(x.shape[0], 4) + x[:, :1] * 0, 64, True).float(),
    "one of several": lambda x: torch.multinomial(WEIGHTS.expand(4096, 4) + x[:1, :1] * 0, 1).reshape(64, 64).float(),
    "dropout in any mode": lambda x: nn.functional.dropout(x + 1, 0.3),
    "channels in any mode": lambda x: nn.functional.dropout1d(x.reshape(64, 64, 1) + 1, 0.3),
    "rrelu in any mode": lambda x: nn.functional.rrelu(x - 1, 0.1, 0.5, training=True),
}


@pytest.mark.parametrize("what", DRAWS)
def test_draws_have_the_distributions_of_pytorch(what: str) -> None:
    torch.manual_seed(0)
    x = torch.zeros(64, 64)
    module = Drawing(DRAWS[what]).eval()
    session = fp.compile(fp.from_torch(module, x), target="numpy").bind()
    first, second = (next(iter(session.step({"x": x.numpy()}).outputs.values())) for _ in range(2))
    with torch.no_grad():
        want = module(x).numpy()
    assert first.shape == want.shape and first.dtype == want.dtype and (first != second).any()
    levels = np.linspace(0.1, 0.9, 9)
    spread = np.subtract(*np.quantile(want, (0.9, 0.1))) or 1.0
    # 4,096 draws: a quantile of a continuous distribution is off by some hundredths of its spread, or by a whole step.
    if len(np.unique(want)) < 64:
        assert len(np.unique(want)) > 16 or set(np.unique(first)) == set(np.unique(want))
        assert first.mean() == pytest.approx(want.mean(), abs=0.06 * max(float(want.std()), 1.0))
    else:
        assert np.abs(np.quantile(first, levels) - np.quantile(want, levels)).max() <= 0.1 * spread


def test_the_sign_of_a_zero_is_copied() -> None:
    class Copied(nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return torch.copysign(x, y)

    x, y = torch.tensor([2.0, -2.0, 3.0, -3.0]), torch.tensor([0.0, 0.0, -0.0, -0.0])
    graph = fp.from_torch(Copied(), x, y)
    (found,) = fp.compile(graph, target="numpy").bind().step({"x": x.numpy(), "y": y.numpy()}).outputs.values()
    assert found.tolist() == torch.copysign(x, y).tolist() == [2.0, 2.0, -3.0, -3.0]


def test_small_numbers_before_large_ones_stay() -> None:
    class Summed(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.logcumsumexp(x, 1)

    x = torch.tensor([[-300.0, -290.0, 0.0, 5.0, -80.0, 60.0], [9.0, 8.0, -500.0, 7.0, 6.0, 5.0]])
    graph = fp.from_torch(Summed(), x, check=True)
    (found,) = fp.compile(graph, target="numpy").bind().step({"x": x.numpy()}).outputs.values()
    np.testing.assert_allclose(found, torch.logcumsumexp(x, 1), rtol=1e-6)
