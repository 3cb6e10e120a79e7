"""Networks that go on from step to step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class LstmTagger(nn.Module):
    def __init__(self, bidirectional: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.lstm = nn.LSTM(12, 10, layers, batch_first=True, bidirectional=bidirectional)
        self.out = nn.Linear(20 if bidirectional else 10, 5)

    def forward(self, tokens):
        x, _ = self.lstm(self.embed(tokens))
        return self.out(x)


class LastState(nn.Module):
    """A classifier that reads the last hidden state."""

    def __init__(self, kind: type[nn.Module], **options) -> None:
        super().__init__()
        self.rnn, self.fc = kind(6, 12, batch_first=True, **options), nn.Linear(12, 3)

    def forward(self, x):
        _, hidden = self.rnn(x)
        return self.fc(hidden[-1])


class UnrolledCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(5, 10), nn.Linear(10, 2)

    def forward(self, x):
        h, c = x.new_zeros(x.shape[0], 10), x.new_zeros(x.shape[0], 10)
        outputs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outputs.append(self.out(h))
        return torch.stack(outputs, dim=1)


class UnrolledGruCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(5, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = torch.zeros(x.shape[0], 8)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.out(h)


class ZeroStates(nn.Module):
    """Initial states that are buffers of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 8), nn.Linear(8, 3)
        self.register_buffer("h0", torch.zeros(1, 1, 8))
        self.register_buffer("c0", torch.zeros(1, 1, 8))

    def forward(self, x):
        batch = x.shape[1]
        y, _ = self.lstm(x, (self.h0.expand(-1, batch, -1).contiguous(), self.c0.expand(-1, batch, -1).contiguous()))
        return self.out(y)


class LearnedState(nn.Module):
    """An initial state that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)
        self.h0 = nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, x):
        y, _ = self.gru(x, self.h0.expand(-1, x.shape[0], -1).contiguous())
        return self.out(y)


class SequenceToSequence(nn.Module):
    """A GRU reads, another one writes from the first one's state."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(30, 10), nn.Embedding(30, 10)
        self.encoder, self.decoder = nn.GRU(10, 12, batch_first=True), nn.GRU(10, 12, batch_first=True)
        self.out = nn.Linear(12, 30)

    def forward(self, source, target):
        _, state = self.encoder(self.source(source))
        y, _ = self.decoder(self.target(target), state)
        return self.out(y)


class HandWrittenRnn(nn.Module):
    """Weights as bare parameters, products by `@`."""

    def __init__(self) -> None:
        super().__init__()
        self.W_xh, self.W_hh = nn.Parameter(torch.randn(4, 8) * 0.3), nn.Parameter(torch.randn(8, 8) * 0.3)
        self.b_h, self.h0 = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
        self.W_hq, self.b_q = nn.Parameter(torch.randn(8, 3) * 0.3), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        h = self.h0.repeat(x.shape[0], 1)
        for t in range(x.shape[1]):
            h = torch.tanh(x[:, t] @ self.W_xh + h @ self.W_hh + self.b_h)
        return h @ self.W_hq + self.b_q


class SelectiveScan(nn.Module):
    """A block of Mamba over eight steps (arXiv 2312.00752)."""

    def __init__(self, width: int = 8, state: int = 4, rank: int = 2) -> None:
        super().__init__()
        self.state, self.rank = state, rank
        self.in_proj, self.out_proj = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        inner = 2 * width
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_weight = nn.Parameter(torch.randn(inner, rank) * 0.3)
        self.dt_bias = nn.Parameter(torch.randn(inner) * 0.1 - 2)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))

    def forward(self, u):
        length = u.shape[1]
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[:, :, :length]).transpose(1, 2)
        dt, b, c = self.x_proj(x).split([self.rank, self.state, self.state], dim=-1)
        dt = F.softplus(F.linear(dt, self.dt_weight) + self.dt_bias)
        a = -torch.exp(self.A_log)
        da = torch.exp(dt.unsqueeze(-1) * a)
        db = dt.unsqueeze(-1) * b.unsqueeze(2) * x.unsqueeze(-1)
        h = torch.zeros_like(da[:, 0])
        ys = []
        for t in range(length):
            h = da[:, t] * h + db[:, t]
            ys.append((h * c[:, t].unsqueeze(1)).sum(-1))
        y = torch.stack(ys, dim=1) + x * self.D
        return self.out_proj(y * F.silu(z))


class DiagonalStates(nn.Module):
    """A linear recurrence as a convolution with a kernel computed from parameters, after S4D (arXiv 2206.11893)."""

    def __init__(self, width: int = 6, state: int = 4, length: int = 10) -> None:
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(width) - 3)
        self.log_a = nn.Parameter(torch.log(0.5 + torch.rand(width, state)))
        self.C, self.D = nn.Parameter(torch.randn(width, state)), nn.Parameter(torch.randn(width))
        self.register_buffer("steps", torch.arange(length).float())
        self.out = nn.Linear(width, width)

    def forward(self, x):
        dta = -torch.exp(self.log_a) * torch.exp(self.log_dt).unsqueeze(-1)
        kernel = ((self.C * (1 - torch.exp(dta))).unsqueeze(-1) * torch.exp(dta.unsqueeze(-1) * self.steps)).sum(1)
        padded = F.pad(x.transpose(1, 2), (x.shape[1] - 1, 0))
        y = F.conv1d(padded, kernel.flip(-1).unsqueeze(1), groups=x.shape[2]) + self.D[:, None] * x.transpose(1, 2)
        return self.out(F.gelu(y.transpose(1, 2)))


MODULES = {
    "lstm": lambda: (LstmTagger(), (torch.randint(0, 30, (2, 6)),)),
    "lstm, two layers": lambda: (LstmTagger(layers=2), (torch.randint(0, 30, (2, 6)),)),
    "lstm, both directions": lambda: (LstmTagger(True), (torch.randint(0, 30, (2, 6)),)),
    "gru": lambda: (LastState(nn.GRU), (torch.randn(2, 6, 6),)),
    "gru without bias": lambda: (LastState(nn.GRU, bias=False), (torch.randn(2, 6, 6),)),
    "rnn": lambda: (LastState(nn.RNN), (torch.randn(2, 6, 6),)),
    "lstm cell": lambda: (UnrolledCell(), (torch.randn(2, 4, 5),)),
    "gru cell": lambda: (UnrolledGruCell(), (torch.randn(2, 4, 5),)),
    "zero states": lambda: (ZeroStates(), (torch.randn(5, 2, 6),)),
    "learned state": lambda: (LearnedState(), (torch.randn(2, 5, 6),)),
    "gru encoder-decoder": lambda: (
        SequenceToSequence(),
        (torch.randint(0, 30, (2, 6)), torch.randint(0, 30, (2, 5))),
    ),
    "hand-written rnn": lambda: (HandWrittenRnn(), (torch.randn(2, 4, 4),)),
    "selective scan": lambda: (SelectiveScan(), (torch.randn(2, 8, 8),)),
    "diagonal states": lambda: (DiagonalStates(), (torch.randn(2, 10, 6),)),
}
