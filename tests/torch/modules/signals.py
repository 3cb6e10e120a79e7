"""Networks over one axis of time."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import weight_norm


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates and skips."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.filters = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**i) for i in range(depth))
        self.gates = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**i) for i in range(depth))
        self.residual = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.skip = nn.ModuleList(nn.Conv1d(width, 12, 1) for _ in range(depth))
        self.out1, self.out2 = nn.Conv1d(12, 12, 1), nn.Conv1d(12, 6, 1)

    def forward(self, x):
        x = self.first(x)
        skips = 0
        for i, (filter, gate) in enumerate(zip(self.filters, self.gates)):
            padded = F.pad(x, (2**i, 0))
            y = torch.tanh(filter(padded)) * torch.sigmoid(gate(padded))
            skips = skips + self.skip[i](y)
            x = x + self.residual[i](y)
        return self.out2(F.relu(self.out1(F.relu(skips))))


class TemporalBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.cut = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(inputs, outputs, 3, padding=self.cut, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(outputs, outputs, 3, padding=self.cut, dilation=dilation))
        self.downsample = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x):
        y = F.relu(self.conv1(x)[:, :, : -self.cut])
        y = F.relu(self.conv2(y)[:, :, : -self.cut].contiguous())
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class TemporalConvolutions(nn.Module):
    """TCN (arXiv 1803.01271), with weight norm of the older kind."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.linear = nn.Sequential(TemporalBlock(2, 8, 1), TemporalBlock(8, 8, 2)), nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(self.network(x)[:, :, -1])


class ConformerConvolution(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.pointwise1, self.pointwise2 = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depthwise = nn.Conv1d(width, width, 7, padding=3, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x):
        y = F.glu(self.pointwise1(self.norm(x).transpose(1, 2)), dim=1)
        y = self.pointwise2(F.silu(self.batch_norm(self.depthwise(y))))
        return x + y.transpose(1, 2)


class MelNet(nn.Module):
    """A filterbank in a buffer, a logarithm, and a small CNN."""

    def __init__(self, bins: int = 33, mels: int = 12) -> None:
        super().__init__()
        centre = torch.linspace(0, bins - 1, mels + 2)
        position = torch.arange(bins).float()
        rising = (position[:, None] - centre[None, :-2]) / (centre[1:-1] - centre[:-2])
        falling = (centre[None, 2:] - position[:, None]) / (centre[2:] - centre[1:-1])
        self.register_buffer("fb", torch.minimum(rising, falling).clamp(min=0))
        self.conv, self.norm, self.fc = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, power):
        mel = torch.matmul(power.transpose(1, 2), self.fb).transpose(1, 2)
        x = torch.log(mel + 1e-6).unsqueeze(1)
        return self.fc(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Spectrogram(nn.Module):
    """A short-time Fourier transform as a convolution with buffers: a window times cosines and sines."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        angle = 2 * math.pi * torch.outer(torch.arange(size // 2 + 1), torch.arange(size)) / size
        window = torch.hann_window(size)
        self.register_buffer("cosines", (angle.cos() * window).unsqueeze(1))
        self.register_buffer("sines", (angle.sin() * window).unsqueeze(1))
        self.conv, self.fc = nn.Conv1d(size // 2 + 1, 8, 3), nn.Linear(8, 3)

    def forward(self, wave):
        wave = wave.unsqueeze(1)
        real, imaginary = F.conv1d(wave, self.cosines, stride=8), F.conv1d(wave, self.sines, stride=8)
        return self.fc(F.relu(self.conv(torch.log1p(real**2 + imaginary**2))).mean(-1))


class Pcen(nn.Module):
    """Per-channel energy normalisation with trained exponents (arXiv 1607.05666)."""

    def __init__(self, bands: int = 8) -> None:
        super().__init__()
        self.log_alpha, self.log_delta = nn.Parameter(torch.zeros(bands)), nn.Parameter(torch.full((bands,), 0.7))
        self.log_r, self.log_s = nn.Parameter(torch.full((bands,), -0.7)), nn.Parameter(torch.full((bands,), -2.0))
        self.fc = nn.Linear(bands, 3)

    def forward(self, energy):
        s, alpha = torch.sigmoid(self.log_s), self.log_alpha.exp()
        delta, r = self.log_delta.exp()[None, :, None], self.log_r.exp()[None, :, None]
        smooth = [energy[:, :, 0]]
        for t in range(1, energy.shape[2]):
            smooth.append((1 - s) * smooth[-1] + s * energy[:, :, t])
        m = torch.stack(smooth, dim=2)
        y = (energy / (m + 1e-6) ** alpha[None, :, None] + delta) ** r - delta**r
        return self.fc(y.mean(-1))


class SincNet(nn.Module):
    """Filters computed from trained cut-off frequencies, and buffers of a window and of times (arXiv 1808.00158)."""

    def __init__(self, filters: int = 6, size: int = 15) -> None:
        super().__init__()
        self.low_hz = nn.Parameter(torch.linspace(0.02, 0.3, filters).view(-1, 1))
        self.band_hz = nn.Parameter(torch.full((filters, 1), 0.08))
        n = torch.linspace(0, size / 2 - 1, size // 2)
        self.register_buffer("window_", 0.54 - 0.46 * torch.cos(2 * math.pi * n / size))
        self.register_buffer("n_", 2 * math.pi * torch.arange(-(size // 2), 0).view(1, -1).float())
        self.conv, self.fc = nn.Conv1d(filters, 8, 3), nn.Linear(8, 3)

    def forward(self, wave):
        low = 0.01 + torch.abs(self.low_hz)
        high = torch.clamp(low + torch.abs(self.band_hz), max=0.5)
        left = (torch.sin(high @ self.n_) - torch.sin(low @ self.n_)) / (self.n_ / 2) * self.window_
        band = 2 * (high - low)
        filters = torch.cat([left, band, torch.flip(left, dims=[1])], dim=1) / (2 * band)
        x = F.conv1d(wave, filters.unsqueeze(1))
        return self.fc(F.leaky_relu(self.conv(torch.abs(x)), 0.2).mean(-1))


class Forecast(nn.Module):
    """Reversible instance norm around a linear forecast: the trained scale is divided out again (RevIN)."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.affine_weight, self.affine_bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.linear = nn.Linear(16, 6)

    def forward(self, x):
        mean = x.mean(dim=1, keepdim=True).detach()
        std = torch.sqrt(x.var(dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
        x = (x - mean) / std * self.affine_weight + self.affine_bias
        y = self.linear(x.transpose(1, 2)).transpose(1, 2)
        return (y - self.affine_bias) / (self.affine_weight + 1e-10) * std + mean


MODULES = {
    "wavenet": lambda: (WaveNet(), (torch.randn(2, 1, 20),)),
    "tcn": lambda: (TemporalConvolutions(), (torch.randn(2, 2, 12),)),
    "conformer convolution": lambda: (ConformerConvolution(), (torch.randn(2, 9, 12),)),
    "mel filterbank": lambda: (MelNet(), (torch.rand(2, 33, 10),)),
    "spectrogram": lambda: (Spectrogram(), (torch.randn(2, 96),)),
    "pcen": lambda: (Pcen(), (torch.rand(2, 8, 6) + 0.1,)),
    "sincnet": lambda: (SincNet(), (torch.randn(2, 1, 40),)),
    "revin forecast": lambda: (Forecast(), (torch.randn(2, 16, 4),)),
}
