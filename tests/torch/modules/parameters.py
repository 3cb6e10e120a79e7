"""Parameters, buffers and constants in the places where they are hard to tell apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 5)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return torch.log_softmax(self.fc(x) / self.temperature, dim=-1)


class UnitScale(nn.Module):
    """A buffer of ones where a gain might stand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(x * self.scale)


class InputNormalization(nn.Module):
    """Images normalised by buffers of three channels."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
        self.conv, self.out = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x):
        x = (x - self.mean) / self.std
        return self.out(F.relu(self.conv(x)).mean(dim=(2, 3)))


class OutputScaling(nn.Module):
    """A regression whose answer goes back to its units by buffers: `* std + mean`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 3)
        self.register_buffer("y_mean", torch.randn(3))
        self.register_buffer("y_std", torch.rand(3) + 0.5)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x))) * self.y_std + self.y_mean


class LearnedNormalization(nn.Module):
    """A shift that is subtracted and a scale that divides, both trained."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc((x - self.shift) / self.scale)


class ScalarGate(nn.Module):
    """ReZero: a residual branch times a scalar that starts at 0 (arXiv 2003.04887)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.alpha = nn.ParameterList(nn.Parameter(torch.tensor(0.0)) for _ in range(3))
        self.out = nn.Linear(10, 2)

    def forward(self, x):
        for layer, alpha in zip(self.layers, self.alpha):
            x = x + alpha * torch.tanh(layer(x))
        return self.out(x)


class GatedScalars(nn.Module):
    """A scalar through a sigmoid, one of shape [1], and one that is subtracted from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mix = nn.Parameter(torch.zeros(1))
        self.beta = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        mix = torch.sigmoid(self.mix)
        y = mix * self.a(x) + (1 - mix) * self.b(x)
        return y * torch.sigmoid(self.beta * y)


class FrozenBackbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.backbone(x).mean(dim=(2, 3)))


class IndexedByInteger(nn.Module):
    """One row of a parameter for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gains, self.layers = nn.Parameter(torch.ones(3, 8)), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * self.gains[i]
        return x


class IndexedByTensors(nn.Module):
    """`table[i, j]` with two tensors of integers, given at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 6, 8) * 0.2)
        self.out = nn.Linear(8, 3)

    def forward(self, i, j):
        return self.out(torch.tanh(self.table[i, j]))


class ExpandedQuery(nn.Module):
    """One learned query for each item of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 2, 12) * 0.2)
        self.key, self.value = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x):
        query = self.query.expand(x.shape[0], -1, -1)
        return torch.softmax(query @ self.key(x).transpose(1, 2) / 12**0.5, dim=-1) @ self.value(x)


class MaskToken(nn.Module):
    """A learned token in the places that a mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(6, 12), nn.Linear(12, 6)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, 12))

    def forward(self, x, mask):
        h = torch.where(mask.unsqueeze(-1), self.mask_token, self.embed(x))
        return self.out(F.gelu(h))


class SlicedPositions(nn.Module):
    """A table of positions, of which as many are read as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(1, 32, 12) * 0.02)
        self.embed, self.out = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x):
        n = x.shape[1]
        return self.out(torch.relu(self.embed(x) + self.pos[:, :n]).mean(dim=1))


class Codebook(nn.Module):
    """Distances to the vectors of a codebook, and a soft choice among them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(10, 6), nn.Linear(6, 10)
        self.codebook = nn.Parameter(torch.randn(16, 6))

    def forward(self, x):
        z = self.encode(x)
        distance = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codebook.t() + self.codebook.pow(2).sum(1)
        return self.decode(torch.softmax(-distance, dim=1) @ self.codebook)


class AveragedCodebook(nn.Module):
    """A codebook that is a buffer: it follows averages outside of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(10, 6), nn.Linear(6, 10)
        self.register_buffer("codebook", torch.randn(16, 6))

    def forward(self, x):
        z = self.encode(x)
        index = torch.cdist(z, self.codebook).argmin(dim=1)
        quantized = F.embedding(index, self.codebook)
        return self.decode(z + quantized), (z - quantized).pow(2).mean(dim=1)


class Prototypes(nn.Module):
    """Cosines to class prototypes, times a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(10, 8)
        self.prototypes = nn.Parameter(torch.randn(5, 8))
        self.sigma = nn.Parameter(torch.tensor(4.0))

    def forward(self, x):
        x = F.normalize(torch.relu(self.fc(x)) + 0.1, dim=-1)
        return self.sigma * F.linear(x, F.normalize(self.prototypes, dim=-1))


class CapsuleRouting(nn.Module):
    """Two rounds of routing by agreement (arXiv 1710.09829)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 10, 4, 6, 5) * 0.3)

    @staticmethod
    def squash(x):
        norm = x.pow(2).sum(dim=-1, keepdim=True)
        return norm / (1 + norm) * x / torch.sqrt(norm + 1e-8)

    def forward(self, x):
        u = (self.weight @ x[:, :, None, :, None]).squeeze(-1)
        b = torch.zeros(u.shape[:3])
        for _ in range(2):
            c = torch.softmax(b, dim=2)
            v = self.squash((c.unsqueeze(-1) * u).sum(dim=1))
            b = b + (u * v.unsqueeze(1)).sum(dim=-1)
        return v


class Relations(nn.Module):
    """A graph convolution whose normalised adjacency is a buffer."""

    def __init__(self, nodes: int = 9) -> None:
        super().__init__()
        edges = ((torch.rand(nodes, nodes) < 0.3).float() + torch.eye(nodes)).clamp(max=1)
        edges = torch.maximum(edges, edges.t())
        degree = edges.sum(1).rsqrt()
        self.register_buffer("adjacency", degree[:, None] * edges * degree[None])
        self.fc1, self.fc2 = nn.Linear(7, 16, bias=False), nn.Linear(16, 4, bias=False)
        self.bias1, self.bias2 = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        x = torch.relu(self.adjacency @ self.fc1(x) + self.bias1)
        return self.adjacency @ self.fc2(x) + self.bias2


class GraphAttention(nn.Module):
    """Dense attention over neighbours (arXiv 1710.10903), with a mask of edges."""

    def __init__(self, nodes: int = 9, heads: int = 2, width: int = 6) -> None:
        super().__init__()
        self.register_buffer("edges", (torch.rand(nodes, nodes) < 0.4) | torch.eye(nodes, dtype=torch.bool))
        self.fc = nn.Linear(7, heads * width, bias=False)
        self.a_source = nn.Parameter(torch.randn(heads, width) * 0.3)
        self.a_target = nn.Parameter(torch.randn(heads, width) * 0.3)
        self.heads, self.width = heads, width
        self.out = nn.Linear(heads * width, 3)

    def forward(self, x):
        h = self.fc(x).view(-1, self.heads, self.width)
        source, target = (h * self.a_source).sum(-1), (h * self.a_target).sum(-1)
        e = F.leaky_relu(source[:, None] + target[None], 0.2)
        e = e.masked_fill(~self.edges.unsqueeze(-1), float("-inf"))
        y = torch.einsum("ijh,jhd->ihd", torch.softmax(e, dim=1), h)
        return self.out(F.elu(y.flatten(1)))


class WhereScales(nn.Module):
    """A learned slope on the negative side, written by hand, and a learned threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 3)
        self.slope = nn.Parameter(torch.full((12,), 0.25))
        self.threshold = nn.Parameter(torch.full((12,), 0.1))

    def forward(self, x):
        x = self.fc1(x)
        x = torch.where(x > 0, x, self.slope * x)
        return self.fc2(torch.sign(x) * F.relu(x.abs() - self.threshold))


class PlainConstant(nn.Module):
    """A tensor that is neither parameter nor buffer, and a list of numbers that becomes one in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.weights = torch.rand(6)

    def forward(self, x):
        return self.fc(x * self.weights) + torch.tensor([0.5, 1.5, 2.5, 3.5, 4.5, 5.5])


def _mask(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) < 0.4


def _below(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape)


MODULES = {
    "learned temperature": lambda: (Temperature(), (torch.randn(4, 8),)),
    "buffer of ones": lambda: (UnitScale(), (torch.randn(4, 8),)),
    "input normalization": lambda: (InputNormalization(), (torch.rand(2, 3, 8, 8),)),
    "output scaling": lambda: (OutputScaling(), (torch.randn(4, 6),)),
    "learned normalization": lambda: (LearnedNormalization(), (torch.randn(4, 6),)),
    "scalar gate": lambda: (ScalarGate(), (torch.randn(4, 10),)),
    "gated scalars": lambda: (GatedScalars(), (torch.randn(4, 8),)),
    "frozen backbone": lambda: (FrozenBackbone(), (torch.randn(2, 3, 8, 8),)),
    "indexed by integer": lambda: (IndexedByInteger(), (torch.randn(4, 8),)),
    "indexed by tensors": lambda: (IndexedByTensors(), (_below(5, 7), _below(6, 7))),
    "expanded query": lambda: (ExpandedQuery(), (torch.randn(3, 5, 12),)),
    "mask token": lambda: (MaskToken(), (torch.randn(2, 6, 6), _mask(2, 6))),
    "sliced positions": lambda: (SlicedPositions(), (torch.randn(2, 9, 6),)),
    "codebook": lambda: (Codebook(), (torch.randn(5, 10),)),
    "averaged codebook": lambda: (AveragedCodebook(), (torch.randn(5, 10),)),
    "prototypes": lambda: (Prototypes(), (torch.randn(5, 10),)),
    "capsule routing": lambda: (CapsuleRouting(), (torch.randn(2, 10, 5),)),
    "graph convolution": lambda: (Relations(), (torch.randn(9, 7),)),
    "graph attention": lambda: (GraphAttention(), (torch.randn(9, 7),)),
    "learned slope by where": lambda: (WhereScales(), (torch.randn(4, 8),)),
    "plain constant": lambda: (PlainConstant(), (torch.randn(4, 6),)),
}
