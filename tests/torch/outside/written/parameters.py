"""Networks that differ in what is trained, and in how its gradient comes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune

from tests.torch.outside.written.network import IMAGES, ROWS, drawn, linear, network, trained


@network(ROWS, inner=lambda: parametrizations.weight_norm(nn.Linear(6, 5), dim=1))
def weight_norm(m: Any, x: Any) -> Any:
    return m.inner(x)


@network(IMAGES, inner=lambda: utils.weight_norm(nn.Conv2d(4, 3, 3), dim=None))
def weight_norm_by_hooks(m: Any, x: Any) -> Any:
    return m.inner(x)


@network(IMAGES, inner=lambda: parametrizations.spectral_norm(nn.Conv2d(4, 3, 3), n_power_iterations=2))
def spectral_norm(m: Any, x: Any) -> Any:
    return m.inner(x)


@network(ROWS, inner=lambda: parametrizations.orthogonal(nn.Linear(6, 4)))
def orthogonal_by_reflections(m: Any, x: Any) -> Any:
    return m.inner(x)


@network(ROWS, inner=lambda: parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley"))
def orthogonal_by_cayley(m: Any, x: Any) -> Any:
    return m.inner(x)


@network(ROWS, inner=lambda: parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="matrix_exp"))
def orthogonal_by_exponential(m: Any, x: Any) -> Any:
    return m.inner(x)


class Symmetric(nn.Module):
    """Of the upper triangle alone."""

    def forward(self, x: Any) -> Any:
        """A matrix."""
        return x.triu() + x.triu(1).mT


def parametrized() -> nn.Module:
    """A layer with a symmetric matrix."""
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@network(ROWS, inner=parametrized)
def symmetric_weight(m: Any, x: Any) -> Any:
    with parametrize.cached():
        return m.inner(m.inner(x).relu())


@network(ROWS, inner=lambda: prune.custom_from_mask(nn.Linear(6, 5), "weight", torch.ones(5, 6).tril()))
def pruned(m: Any, x: Any) -> Any:
    return m.inner(x)


@network(ROWS, a=linear(6, 6), b=linear(6, 6))
def detached(m: Any, x: Any) -> Any:
    y = m.a(x)
    return m.b(y.detach()) + y, m.b(y) * y.data


@network(ROWS, student=linear(6, 5), teacher=linear(6, 5))
def distilled(m: Any, x: Any) -> Any:
    with torch.no_grad():
        wanted = m.teacher(x).softmax(-1)
    return F.kl_div(m.student(x).log_softmax(-1), wanted, reduction="batchmean")


@network(ROWS, inner=linear(6, 5), average=lambda: torch.zeros(5))
def moving_average_of_buffers(m: Any, x: Any) -> Any:
    y = m.inner(x)
    if m.training:
        with torch.no_grad():
            m.average.lerp_(y.mean(0), 0.1)
    return y - m.average


@network(ROWS, inner=linear(6, 6), codes=trained(7, 6))
def quantized_by_codes(m: Any, x: Any) -> Any:
    y = m.inner(x)
    chosen = m.codes[torch.cdist(y, m.codes).argmin(-1)]
    return y + (chosen - y).detach(), F.mse_loss(chosen, y.detach()), 0.25 * F.mse_loss(y, chosen.detach())


@network(
    ROWS,
    inner=linear(6, 6),
    codes=drawn(7, 6),
    counts=lambda: torch.ones(7),
    sums=drawn(7, 6),
)
def codes_that_follow_means(m: Any, x: Any) -> Any:
    y = m.inner(x)
    places = (y.unsqueeze(1) - m.codes).square().sum(-1).argmin(-1)
    if m.training:
        one = F.one_hot(places, 7).to(y.dtype)
        m.counts.data.mul_(0.9).add_(one.sum(0), alpha=0.1)
        m.sums.mul_(0.9).add_((one.T @ y).detach(), alpha=0.1)
        m.codes.copy_(m.sums / m.counts.clamp(min=1e-3).unsqueeze(1))
    return y + (F.embedding(places, m.codes) - y).detach()


@network(ROWS, query=linear(6, 4), key=lambda: linear(6, 4)().requires_grad_(False))
def weights_that_follow_others(m: Any, x: Any) -> Any:
    if m.training:
        for mine, theirs in zip(m.key.parameters(), m.query.parameters()):
            mine.data = mine.data * 0.9 + theirs.data * 0.1
    return F.normalize(m.query(x)) @ F.normalize(m.key(x)).T


@network(ROWS, inner=linear(6, 5), scale=lambda: torch.ones(()))
def buffer_that_is_made_anew(m: Any, x: Any) -> Any:
    y = m.inner(x) / m.scale
    if m.training:
        m.scale = 0.9 * m.scale + 0.1 * y.detach().abs().max()
    with torch.inference_mode():
        shift = m.inner(x).mean()
    return y + shift


@network(
    ROWS, inner=linear(6, 4), queue=lambda: F.normalize(torch.randn(8, 4)), at=lambda: torch.zeros(1, dtype=torch.long)
)
def queue_of_keys(m: Any, x: Any) -> Any:
    y = F.normalize(m.inner(x))
    scores = y @ m.queue.clone().detach().T / 0.2
    if m.training:
        places = (m.at + torch.arange(4)) % 8
        m.queue[places] = y.detach()
        m.at.copy_((m.at + 4) % 8)
    return scores.logsumexp(-1)


@network(ROWS, table=lambda: nn.Embedding(9, 6), inner=linear(6, 6))
def tied(m: Any, x: Any) -> Any:
    return m.inner(x) @ m.table.weight.T


@network(
    ROWS,
    base=lambda: nn.Linear(6, 5).requires_grad_(False),
    down=trained(6, 2),
    up=lambda: nn.Parameter(torch.zeros(2, 5)),
)
def low_rank_beside_frozen(m: Any, x: Any) -> Any:
    return m.base(x) + x @ m.down @ m.up * 0.5


@network(ROWS, parts=lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(6)), "b": nn.Parameter(torch.zeros(6))}))
def parameters_in_a_dictionary(m: Any, x: Any) -> Any:
    return {"sum": x * m.parts["a"] + m.parts["b"], "more": [part.sum() for part in m.parts.values()]}


@network(ROWS, inner=linear(6, 6, 6))
def hooked(m: Any, x: Any) -> Any:
    seen: list[Any] = []
    handle = m.inner[0].register_forward_hook(lambda layer, given, y: seen.append(y) or y * 2)
    try:
        return m.inner(x) + seen[0]
    finally:
        handle.remove()


class Rounded(torch.autograd.Function):
    """Rounded, with the gradient of what is not."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Quarters."""
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """As it comes."""
        return g.clamp(-1, 1)


@network(ROWS, inner=linear(6, 5))
def gradient_of_ones_own(m: Any, x: Any) -> Any:
    return Rounded.apply(m.inner(x))


@network(ROWS, inner=linear(6, 6, 6))
def checkpointed(m: Any, x: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(m.inner, x, use_reentrant=False) + x


@network(ROWS, inner=linear(6, 5))
def quantized_to_eight_bits(m: Any, x: Any) -> Any:
    return torch.fake_quantize_per_tensor_affine(m.inner(x), 0.05, 3, -128, 127)
