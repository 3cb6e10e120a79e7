"""Layers of products, and what stands between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class Mlp(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 5)
        )

    def forward(self, x):
        return self.net(x)


class LayerNormMlp(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, width)
        self.norm1 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.out = nn.Linear(width, 4)

    def forward(self, x):
        x = F.relu(self.norm1(self.fc1(x)))
        x = torch.tanh(self.norm2(self.fc2(x)))
        return self.out(x)


class SelfNormalizing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, 20), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(20, 20), nn.SELU(), nn.Linear(20, 3)
        )

    def forward(self, x):
        return self.net(x)


class PReluMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act1 = nn.Linear(12, 20), nn.PReLU(20)
        self.fc2, self.act2 = nn.Linear(20, 20), nn.PReLU()
        self.out = nn.Linear(20, 3)

    def forward(self, x):
        return self.out(self.act2(self.fc2(self.act1(self.fc1(x)))))


class WeightNormMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = weight_norm(nn.Linear(12, 20))
        self.fc2 = weight_norm(nn.Linear(20, 5), dim=None)

    def forward(self, x):
        return self.fc2(F.leaky_relu(self.fc1(x), 0.1))


class SpectralNormMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = spectral_norm(nn.Linear(12, 20))
        self.fc2 = spectral_norm(nn.Linear(20, 1))

    def forward(self, x):
        return self.fc2(F.leaky_relu(self.fc1(x), 0.2))


class ResidualMlp(nn.Module):
    def __init__(self, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(10, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class BatchNormMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(12, 20), nn.BatchNorm1d(20)
        self.fc2, self.bn2 = nn.Linear(20, 20, bias=False), nn.BatchNorm1d(20)
        self.out = nn.Linear(20, 3)

    def forward(self, x):
        x = F.relu(self.bn1(self.fc1(x)))
        x = self.bn2(F.relu(self.fc2(x)))
        return self.out(x)


class Highway(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.plain = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        for plain, gate in zip(self.plain, self.gates):
            t = torch.sigmoid(gate(x))
            x = t * F.relu(plain(x)) + (1 - t) * x
        return self.out(x)


class BilinearPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 10), nn.Linear(6, 12)
        self.pair = nn.Bilinear(10, 12, 4)

    def forward(self, a, b):
        return self.pair(torch.tanh(self.left(a)), torch.tanh(self.right(b)))


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained product of low rank beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, inputs) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = 2.0 / rank

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scale


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = LoraLinear(16, 24), LoraLinear(24, 8)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(3, 32), nn.ELU(), nn.Linear(32, 32), nn.ELU())
        self.rho = nn.Sequential(nn.Linear(32, 16), nn.ELU(), nn.Linear(16, 4))

    def forward(self, points):
        return self.rho(self.phi(points).sum(dim=1))


class Siamese(nn.Module):
    """Two inputs through the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
        self.out = nn.Linear(8, 1)

    def forward(self, a, b):
        return self.out(torch.abs(self.branch(a) - self.branch(b)))


class EinsumLayers(nn.Module):
    """Products written by their axes, as those who come from TensorFlow write them."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(8, 4, 6) * 0.2)
        self.b1 = nn.Parameter(torch.zeros(4, 6))
        self.w2 = nn.Parameter(torch.randn(4, 6, 5) * 0.2)
        self.mix = nn.Parameter(torch.randn(5, 5) * 0.3)

    def forward(self, x):
        h = torch.relu(torch.einsum("btd,dhk->bthk", x, self.w1) + self.b1)
        y = torch.einsum("bthk,hkd->btd", h, self.w2)
        return torch.einsum("btd,de,bte->bt", y, self.mix, y)


class Hypernetwork(nn.Module):
    """A layer whose weights another layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper = nn.Linear(4, 6 * 8 + 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x, task):
        made = self.hyper(task)
        weight, bias = made[:, :48].view(-1, 8, 6), made[:, 48:]
        h = torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1) + bias
        return self.out(torch.relu(h))


class Film(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.film = nn.Linear(5, 24)
        self.out = nn.Linear(12, 3)

    def forward(self, x, condition):
        gamma, beta = self.film(condition).chunk(2, dim=1)
        x = self.conv2(torch.relu(self.conv1(x)))
        x = torch.relu(x * (1 + gamma[:, :, None, None]) + beta[:, :, None, None])
        return self.out(x.mean(dim=(2, 3)))


class KolmogorovArnold(nn.Module):
    """One layer of splines on a fixed grid, after "KAN: Kolmogorov-Arnold Networks" (arXiv 2404.19756)."""

    def __init__(self, inputs: int = 6, outputs: int = 5, size: int = 5, order: int = 3) -> None:
        super().__init__()
        step = 2 / size
        grid = (torch.arange(-order, size + order + 1) * step - 1).expand(inputs, -1).contiguous()
        self.register_buffer("grid", grid)
        self.order = order
        self.base_weight = nn.Parameter(torch.randn(outputs, inputs) * 0.3)
        self.spline_weight = nn.Parameter(torch.randn(outputs, inputs, size + order) * 0.1)
        self.spline_scaler = nn.Parameter(torch.ones(outputs, inputs))

    def bases(self, x):
        x, grid = x.unsqueeze(-1), self.grid
        bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * bases[:, :, :-1]
            right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k]) * bases[:, :, 1:]
            bases = left + right
        return bases

    def forward(self, x):
        weight = (self.spline_weight * self.spline_scaler.unsqueeze(-1)).flatten(1)
        return F.linear(F.silu(x), self.base_weight) + F.linear(self.bases(x).flatten(1), weight)


class FourierFeatures(nn.Module):
    """Fixed random frequencies, a buffer, before an MLP (arXiv 2006.10739)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("B", torch.randn(2, 16) * 3)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3), nn.Sigmoid())

    def forward(self, x):
        projected = 2 * torch.pi * x @ self.B
        return self.net(torch.cat([projected.sin(), projected.cos()], dim=-1))


class LearnedFourier(nn.Module):
    """Positions whose frequencies are trained (arXiv 2106.02795)."""

    def __init__(self) -> None:
        super().__init__()
        self.freqs = nn.Parameter(torch.randn(2, 12))
        self.phase = nn.Parameter(torch.zeros(12))
        self.net = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 6))

    def forward(self, x):
        angle = x @ self.freqs + self.phase
        return self.net(torch.cat([torch.cos(angle), torch.sin(angle)], dim=-1) / 12**0.5)


class Nerf(nn.Module):
    """Positional encoding with a buffer of frequencies, a skip connection and two heads."""

    def __init__(self, width: int = 32, bands: int = 4) -> None:
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(bands))
        width_in = 3 + 3 * 2 * bands
        self.first = nn.ModuleList([nn.Linear(width_in, width), nn.Linear(width, width)])
        self.second = nn.ModuleList([nn.Linear(width + width_in, width), nn.Linear(width, width)])
        self.density, self.color = nn.Linear(width, 1), nn.Linear(width + 3, 3)

    def forward(self, x, direction):
        angle = (x[..., None] * self.bands).flatten(-2)
        encoded = torch.cat([x, angle.sin(), angle.cos()], dim=-1)
        h = encoded
        for layer in self.first:
            h = F.relu(layer(h))
        h = torch.cat([h, encoded], dim=-1)
        for layer in self.second:
            h = F.relu(layer(h))
        color = torch.sigmoid(self.color(torch.cat([h, direction], dim=-1)))
        return torch.cat([color, F.softplus(self.density(h))], dim=-1)


class Coupling(nn.Module):
    """Affine couplings with alternating masks, as in RealNVP, and the logarithm of the determinant."""

    def __init__(self, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        mask = (torch.arange(width) % 2).float()
        self.register_buffer("mask", torch.stack([mask if i % 2 else 1 - mask for i in range(depth)]))
        self.s = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, width), nn.Tanh()) for _ in range(depth)
        )
        self.t = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, width)) for _ in range(depth)
        )
        self.scale = nn.Parameter(torch.ones(depth, width))

    def forward(self, x):
        log_det = x.new_zeros(x.shape[0])
        for i, (s, t) in enumerate(zip(self.s, self.t)):
            kept = x * self.mask[i]
            log_s = s(kept) * self.scale[i] * (1 - self.mask[i])
            x = kept + (1 - self.mask[i]) * (x * log_s.exp() + t(kept))
            log_det = log_det + log_s.sum(dim=1)
        return x, log_det


class MixtureOfExperts(nn.Module):
    """Each expert sees each item; a softmax weighs them."""

    def __init__(self, width: int = 12, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, width, 16) * 0.2)
        self.b1 = nn.Parameter(torch.zeros(experts, 16))
        self.w2 = nn.Parameter(torch.randn(experts, 16, width) * 0.2)
        self.b2 = nn.Parameter(torch.zeros(experts, width))

    def forward(self, x):
        gate = torch.softmax(self.gate(x), dim=-1)
        h = F.gelu(torch.einsum("bd,edh->beh", x, self.w1) + self.b1)
        y = torch.einsum("beh,ehd->bed", h, self.w2) + self.b2
        return (gate.unsqueeze(-1) * y).sum(dim=1)


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


MODULES = {
    "mlp with dropout": lambda: (Mlp(), (_rows(4, 16),)),
    "mlp with layer norm": lambda: (LayerNormMlp(), (_rows(4, 16),)),
    "mlp with batch norm": lambda: (BatchNormMlp(), (_rows(8, 12),)),
    "mlp with selu": lambda: (SelfNormalizing(), (_rows(4, 12),)),
    "mlp with prelu": lambda: (PReluMlp(), (_rows(4, 12),)),
    "mlp with weight norm": lambda: (WeightNormMlp(), (_rows(4, 12),)),
    "mlp with spectral norm": lambda: (SpectralNormMlp(), (_rows(4, 12),)),
    "residual mlp": lambda: (ResidualMlp(), (_rows(4, 10),)),
    "highway": lambda: (Highway(), (_rows(4, 16),)),
    "bilinear": lambda: (BilinearPair(), (_rows(4, 8), _rows(4, 6))),
    "lora": lambda: (Lora(), (_rows(4, 16),)),
    "deep sets": lambda: (DeepSets(), (_rows(3, 7, 3),)),
    "siamese": lambda: (Siamese(), (_rows(4, 12), _rows(4, 12))),
    "einsum layers": lambda: (EinsumLayers(), (_rows(2, 3, 8),)),
    "hypernetwork": lambda: (Hypernetwork(), (_rows(3, 6), _rows(3, 4))),
    "film": lambda: (Film(), (_rows(2, 3, 8, 8), _rows(2, 5))),
    "kolmogorov-arnold": lambda: (KolmogorovArnold(), (torch.rand(4, 6) * 1.8 - 0.9,)),
    "fourier features": lambda: (FourierFeatures(), (torch.rand(6, 2),)),
    "learned fourier positions": lambda: (LearnedFourier(), (torch.rand(6, 2),)),
    "nerf": lambda: (Nerf(), (_rows(5, 3), F.normalize(_rows(5, 3), dim=-1))),
    "coupling flow": lambda: (Coupling(), (_rows(5, 6),)),
    "mixture of experts": lambda: (MixtureOfExperts(), (_rows(5, 12),)),
}
