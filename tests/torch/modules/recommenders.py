"""Networks over sparse features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

SIZES = (20, 30, 15)


class Dlrm(nn.Module):
    """Dense features, one table a sparse feature, and products of all pairs (arXiv 1906.00091)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in SIZES)
        i, j = torch.tril_indices(4, 4, offset=-1)
        self.register_buffer("i", i)
        self.register_buffer("j", j)
        self.top = nn.Sequential(nn.Linear(width + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        vectors = torch.stack([x] + [table(sparse[:, k]) for k, table in enumerate(self.tables)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.i, self.j]
        return torch.sigmoid(self.top(torch.cat([x, products], dim=1)))


class MatrixFactorization(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, width), nn.Embedding(30, width)
        self.user_bias, self.item_bias = nn.Embedding(20, 1), nn.Embedding(30, 1)
        self.bias = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean_rating", torch.tensor(3.5))

    def forward(self, user, item):
        score = (self.users(user) * self.items(item)).sum(dim=1)
        return score + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1) + self.bias + self.mean_rating


class DeepFm(nn.Module):
    """One table with offsets for all fields, as torchfm writes it."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, *SIZES[:-1]]).cumsum(0))
        self.linear, self.embedding = nn.Embedding(sum(SIZES), 1), nn.Embedding(sum(SIZES), width)
        self.bias = nn.Parameter(torch.zeros((1,)))
        self.mlp = nn.Sequential(nn.Linear(3 * width, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        x = x + self.offsets.unsqueeze(0)
        e = self.embedding(x)
        pairs = 0.5 * (e.sum(dim=1) ** 2 - (e**2).sum(dim=1)).sum(dim=1, keepdim=True)
        return torch.sigmoid(self.linear(x).sum(dim=1) + self.bias + pairs + self.mlp(e.flatten(1))).squeeze(1)


class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(20, 1) * 0.1)
        self.tables = nn.ModuleList(nn.Embedding(size, 4) for size in SIZES)
        self.deep = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, crossed, sparse):
        deep = torch.cat([table(column) for table, column in zip(self.tables, sparse.unbind(1))], dim=1)
        return torch.sigmoid(crossed @ self.wide + self.deep(deep) + self.bias)


class NeuralCf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(20, 6), nn.Embedding(30, 6)
        self.user_mlp, self.item_mlp = nn.Embedding(20, 8), nn.Embedding(30, 8)
        self.mlp = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU())
        self.out = nn.Linear(12, 1)

    def forward(self, user, item):
        a = self.user_gmf(user) * self.item_gmf(item)
        b = self.mlp(torch.cat([self.user_mlp(user), self.item_mlp(item)], dim=-1))
        return self.out(torch.cat([a, b], dim=-1)).squeeze(-1)


class BagOfWords(nn.Module):
    """A sum of embeddings and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.fc = nn.EmbeddingBag(40, 10, mode="mean"), nn.Linear(10, 4)

    def forward(self, words):
        return self.fc(self.bag(words))


class KnowledgeGraph(nn.Module):
    """TransE: a distance between translated entities, against a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.entities, self.relations = nn.Embedding(30, 8), nn.Embedding(6, 8)
        self.margin = nn.Parameter(torch.tensor([2.0]), requires_grad=False)

    def forward(self, head, relation, tail):
        h, t = F.normalize(self.entities(head), dim=-1), F.normalize(self.entities(tail), dim=-1)
        return self.margin - torch.norm(h + self.relations(relation) - t, p=2, dim=-1)


def _ids(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape)


MODULES = {
    "dlrm": lambda: (Dlrm(), (torch.rand(4, 5), _ids(15, 4, 3))),
    "matrix factorization": lambda: (MatrixFactorization(), (_ids(20, 5), _ids(30, 5))),
    "deepfm": lambda: (DeepFm(), (_ids(15, 4, 3),)),
    "wide and deep": lambda: (WideAndDeep(), (_ids(2, 4, 20).float(), _ids(15, 4, 3))),
    "neural cf": lambda: (NeuralCf(), (_ids(20, 5), _ids(30, 5))),
    "bag of words": lambda: (BagOfWords(), (_ids(40, 3, 6),)),
    "knowledge graph": lambda: (KnowledgeGraph(), (_ids(30, 5), _ids(6, 5), _ids(30, 5))),
}
