"""Gradients within a module, functions that are mapped over items, and what else an export loses, beside PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402
from torch.func import functional_call, grad, vmap  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.base.errors import ModelError, UnsupportedError  # noqa: E402
from tests.torch.beside import assert_trains_as_pytorch  # noqa: E402


class Computes(nn.Module):
    """Two networks, and what is computed with them."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.compute = compute
        self.first = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.second = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        """Whatever it is."""
        return self.compute(self, x)


def penalty(m: Any, x: Any) -> Any:
    """Of slopes that are not 1 (Gulrajani et al. 2017)."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.first(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square()


def equation(m: Any, x: Any) -> Any:
    """A second derivative, by cotangents."""
    x = x.clone().requires_grad_()
    y = m.first(x)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return bend[:, 0] + y[:, 0].sin() * slope[:, 1]


def inner_step(m: Any, x: Any) -> Any:
    """The loss after a step on another loss (Finn et al. 2017)."""
    weights = dict(m.first.named_parameters())
    slopes = torch.autograd.grad(m.first(x[:2]).square().mean(), [*weights.values()], create_graph=True)
    moved = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes)}
    return functional_call(m.first, moved, (x[2:],))


def first_order(m: Any, x: Any) -> Any:
    """The same with slopes that are numbers."""
    weights = dict(m.first.named_parameters())
    slopes = torch.autograd.grad(m.first(x[:2]).square().mean(), [*weights.values()])
    return functional_call(m.first, {k: w - 0.1 * g for (k, w), g in zip(weights.items(), slopes)}, (x[2:],))


def of_arguments(m: Any, x: Any) -> Any:
    """By the argument alone, which the function also reads as a tensor that is none."""
    return grad(lambda z: (m.first(z) * x.sum() * m.second(x)).sum())(x)


def of_several(m: Any, x: Any) -> Any:
    """By a dictionary of arguments, and the value."""
    (slopes,), (value, more) = torch.func.grad_and_value(
        lambda given: ((m.first(given["a"]) * given["b"]).sum(), given["b"] * 2), argnums=(0,), has_aux=True
    )({"a": x, "b": x[:, :1]})
    return slopes["a"] + slopes["b"], value, more


def jacobians(m: Any, x: Any) -> Any:
    """Of rows, backward and forward, and a matrix of second derivatives."""
    both = nn.Sequential(m.first[0], nn.Tanh())
    second = torch.func.hessian(lambda row: m.second(row).squeeze())(x[0])
    return torch.func.jacrev(both)(x[0]), torch.func.jacfwd(both)(x[1]), second


def products(m: Any, x: Any) -> Any:
    """A Jacobian times a vector, and a vector times a Jacobian."""
    value, along = torch.func.jvp(m.first, (x,), (x * 2,))
    other, pulled = torch.func.vjp(lambda a, b: m.second(a * b), x, x + 1)
    return value, along, pulled(other.detach())


def without_gradient(m: Any, x: Any) -> Any:
    """What is read in three ways without a gradient."""
    with torch.inference_mode():
        mean = m.first(x).mean()
    return m.first(x) + mean + m.second(x).data * m.first(x) + m.second(x)


def made_anew(m: Any, x: Any) -> Any:
    """A buffer that forward makes anew, and one that it writes through `data`."""
    y = m.first(x) / m.scale
    m.scale = 0.9 * m.scale + 0.1 * y.detach().abs().max()
    m.offset.data = m.offset.data + y.data.mean(0)
    return y + m.second(x) * m.offset


def distributed(m: Any, x: Any) -> Any:
    """Distributions, whose arguments are checked elsewhere."""
    normal = torch.distributions.Normal(m.first(x), nn.functional.softplus(m.second(x)))
    prior = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0))
    gamma = torch.distributions.Gamma(nn.functional.softplus(m.first(x)), torch.ones(()))
    variance = nn.functional.softplus(m.second(x))
    likely = nn.functional.gaussian_nll_loss(m.first(x), x[:, :1], variance)
    return normal.log_prob(x[:, :1]) + prior, gamma.log_prob(x[:, :1].exp()), likely


def over_rows(m: Any, x: Any) -> Any:
    """A function of a row, and of all rows at once."""
    return vmap(lambda row, all_rows: m.first(row) + all_rows.mean(), in_dims=(0, None), out_dims=1)(x, x)


def slopes_of_rows(m: Any, x: Any) -> Any:
    """A gradient for each row."""
    return vmap(grad(lambda row: m.first(row).squeeze()))(x)


def ensemble(m: Any, x: Any) -> Any:
    """Two networks as one."""
    other = dict(m.second.named_parameters())
    weights = {name: torch.stack([weight, other[name]]) for name, weight in m.first.named_parameters()}
    return vmap(lambda each: functional_call(m.first, each, (x,)))(weights)


@pytest.mark.parametrize(
    "compute",
    [
        penalty,
        equation,
        inner_step,
        first_order,
        of_arguments,
        of_several,
        jacobians,
        products,
        over_rows,
        without_gradient,
        made_anew,
        distributed,
        slopes_of_rows,
        ensemble,
    ],
)
def test_what_is_within_a_module_trains_as_in_pytorch(compute: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    ours = Computes(compute)
    assert_trains_as_pytorch(ours, copy.deepcopy(ours), (torch.randn(4, 3),))


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda m, x: vmap(lambda row: m.first(row))(x.repeat(20, 1)), "vmap over 80 items"),
        (lambda m, x: m.first(x).sum().backward(), r"backward\(\) within a module.*\(test_transforms\.py:\d+: "),
        (
            lambda m, x: nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([3]), batch_first=True).data,
            "padded tensor",
        ),
        (
            lambda m, x: torch.autograd.grad(m.first(x).sum(), torch.zeros(2, requires_grad=True), allow_unused=True),
            "known while importing",
        ),
    ],
)
def test_what_cannot_be_within_a_module_is_told(compute: Callable[..., Any], message: str) -> None:
    with pytest.raises((UnsupportedError, ModelError), match=message):
        fp.from_torch(Computes(compute), torch.randn(4, 3))


def test_sparse_tensors_are_told() -> None:
    module = nn.Linear(3, 3)
    within = Computes(lambda m, x: torch.sparse.mm(torch.eye(4).to_sparse(), m.first(x)))
    with pytest.raises(UnsupportedError, match=r"_sparse_mm.*test_transforms\.py:\d+\).*to_dense"):
        fp.from_torch(within, torch.randn(4, 3))
    module.register_buffer("edges", torch.eye(3).to_sparse())
    with pytest.raises(UnsupportedError, match="'edges' is sparse"):
        fp.from_torch(module, torch.randn(4, 3))


def test_masks_of_encoders_are_inputs() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    ours = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    masks = {"mask": nn.Transformer.generate_square_subsequent_mask(5), "src_key_padding_mask": torch.zeros(2, 5)}
    assert_trains_as_pytorch(ours, copy.deepcopy(ours), (torch.randn(2, 5, 8),), kwargs=masks)
