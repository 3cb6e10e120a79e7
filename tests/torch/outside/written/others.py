"""Networks over graphs, points and probabilities, and what asks the data."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.torch.outside.written.network import ROWS, drawn, linear, network, trained


@network(ROWS, message=linear(12, 6), inner=lambda: nn.GRUCell(6, 6))
def messages_along_edges(m: Any, x: Any) -> Any:
    start, end = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])
    sent = m.message(torch.cat([x[start], x[end]], -1))
    summed = torch.zeros_like(x).index_add_(0, end, sent)
    largest = torch.zeros_like(x).scatter_reduce(0, end[:, None].expand_as(sent), sent, "amax", include_self=False)
    return m.inner(summed / torch.bincount(end, minlength=4)[:, None], largest)


@network(drawn(2, 6, 3), inner=linear(3, 5))
def near_points(m: Any, x: Any) -> Any:
    near = torch.cdist(x, x).topk(3, largest=False).indices
    y = m.inner(x)
    gathered = torch.gather(y.unsqueeze(1).expand(2, 6, 6, 5), 2, near.unsqueeze(-1).expand(2, 6, 3, 5))
    return gathered.amax(2) - y


@network(ROWS, ROWS, inner=linear(6, 4))
def contrasted(m: Any, a: Any, b: Any) -> Any:
    y = F.normalize(torch.cat([m.inner(a), m.inner(b)]), dim=1)
    scores = (y @ y.T / 0.5).fill_diagonal_(float("-inf"))
    return F.cross_entropy(scores, torch.arange(8).roll(4))


@network(ROWS, inner=linear(3, 8, 6))
def coupled_flow(m: Any, x: Any) -> Any:
    a, b = x.chunk(2, 1)
    shift, scale = m.inner(a).chunk(2, 1)
    y = torch.cat([a, b * torch.exp(torch.tanh(scale)) + shift], 1)
    normal = torch.distributions.Normal(torch.zeros(6), torch.ones(6), validate_args=False)
    return normal.log_prob(y).sum(1) + torch.tanh(scale).sum(1)


@network(ROWS, drawn(4, 2), inner=linear(6, 15))
def mixture_of_normals(m: Any, x: Any, y: Any) -> Any:
    share, mean, size = m.inner(x).split([3, 6, 6], -1)
    off = (y.unsqueeze(1) - mean.view(4, 3, 2)) / (F.softplus(size.view(4, 3, 2)) + 0.1)
    each = -0.5 * off.square() - torch.log(F.softplus(size.view(4, 3, 2)) + 0.1) - 0.5 * math.log(2 * math.pi)
    return -torch.logsumexp(share.log_softmax(-1) + each.sum(-1), -1)


@network(ROWS, ROWS, inner=linear(6, 4))
def transported(m: Any, a: Any, b: Any) -> Any:
    cost = torch.cdist(m.inner(a), m.inner(b), p=1)
    u, v = torch.zeros(4), torch.zeros(4)
    for _ in range(5):
        u = -torch.logsumexp(v[None] - cost, 1)
        v = -torch.logsumexp(u[:, None] - cost, 0)
    return (torch.exp(u[:, None] + v[None] - cost) * cost).sum()


@network(ROWS, factor=trained(6, 3), noise=trained(6))
def process_of_a_kernel(m: Any, x: Any) -> Any:
    spread = m.factor @ m.factor.T + torch.diag(F.softplus(m.noise))
    root = torch.linalg.cholesky(spread)
    half = torch.linalg.solve_triangular(root, x.T, upper=False)
    return half.square().sum() + 2 * root.diagonal().log().sum() + torch.logdet(spread)


@network(
    ROWS,
    base=linear(6, 5),
    other=lambda: nn.ParameterList([nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.zeros(5))]),
)
def called_with_other_weights(m: Any, x: Any) -> Any:
    weight, bias = m.other
    return torch.func.functional_call(m.base, {"0.weight": weight * 2, "0.bias": bias}, (x,)) + m.base(x)


@network(ROWS, grid=lambda: torch.linspace(-2, 2, 9), weight=trained(6, 6, 6))
def splines(m: Any, x: Any) -> Any:
    x = x.unsqueeze(-1)
    bases = ((x >= m.grid[:-1]) & (x < m.grid[1:])).to(x.dtype)
    for k in range(1, 3):
        left, right = m.grid[: -k - 1], m.grid[k + 1 :]
        up, down = (x - left) / (m.grid[k:-1] - left), (right - x) / (right - m.grid[1:-k])
        bases = up * bases[..., :-1] + down * bases[..., 1:]
    return torch.einsum("big,iog->bo", bases, m.weight)


@network(drawn(2, 6, 4), weight=trained(6, 3, 4, 5))
def routed_capsules(m: Any, x: Any) -> Any:
    votes = torch.einsum("bid,ijde->bije", x, m.weight)
    logits = torch.zeros(2, 6, 3)
    for step in range(3):
        y = (logits.softmax(2).unsqueeze(-1) * (votes.detach() if step < 2 else votes)).sum(1)
        square = y.square().sum(-1, keepdim=True)
        y = square / (1 + square) * y / torch.sqrt(square + 1e-8)
        logits = logits + (votes.detach() * y.unsqueeze(1)).sum(-1)
    return y


# What no graph of fixed shapes holds as it stands.


@network(ROWS, inner=linear(6, 6))
def elements_where_a_mask_holds(m: Any, x: Any) -> Any:
    y = m.inner(x)
    return y[y > 0].mean()


@network(ROWS, a=linear(6, 6), b=linear(6, 6))
def branch_by_numbers(m: Any, x: Any) -> Any:
    return m.a(x) if x.sum() > 0 else m.b(x)


@network(ROWS, a=linear(6, 6), b=linear(6, 6))
def branch_in_the_graph(m: Any, x: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda y: m.a(y), lambda y: m.b(y), (x,))


@network(ROWS, inner=linear(6, 6))
def mapped_over_rows(m: Any, x: Any) -> Any:
    return torch.func.vmap(lambda row: m.inner(row).sum())(x)


@network(ROWS, inner=linear(6, 6))
def gradient_within(m: Any, x: Any) -> Any:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.inner(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square()


@network(ROWS, weight=lambda: nn.Parameter(torch.randn(6, 3, dtype=torch.cfloat)))
def complex_weights(m: Any, x: Any) -> Any:
    return (x.to(torch.cfloat) @ m.weight).abs()
