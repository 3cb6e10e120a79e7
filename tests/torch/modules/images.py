"""Networks that give images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class StyleTransfer(nn.Module):
    """Instance norm with weights, reflected borders, and a nearest upsampling (arXiv 1603.08155)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(3, 8, 3, 2), nn.InstanceNorm2d(8, affine=True), nn.ReLU()
        )
        self.block = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReLU()
        )
        self.out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x):
        x = self.down(x)
        x = x + self.block(x)
        return torch.sigmoid(self.out(F.interpolate(x, scale_factor=2, mode="nearest")))


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, bilinear: bool) -> None:
        super().__init__()
        self.down1, self.down2, self.pool = double_conv(1, 8), double_conv(8, 16), nn.MaxPool2d(2)
        if bilinear:
            self.up: nn.Module = nn.Sequential(
                nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), nn.Conv2d(16, 8, 1)
            )
        else:
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join, self.out = double_conv(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        return self.out(self.join(torch.cat([a, self.up(b)], dim=1)))


class Generator(nn.Module):
    """Of DCGAN: transposed convolutions from a vector of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(16, 16, 4, 1, 0, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z[:, :, None, None])


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, 1, 0, bias=False),
        )

    def forward(self, x):
        return self.main(x).view(-1)


class VariationalAutoencoder(nn.Module):
    """The noise is an input, so that a step can be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(32, 24), nn.ReLU())
        self.mu, self.log_var = nn.Linear(24, 6), nn.Linear(24, 6)
        self.decode = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 32), nn.Sigmoid())

    def forward(self, x, noise):
        h = self.encode(x)
        mu, log_var = self.mu(h), self.log_var(h)
        z = mu + noise * torch.exp(0.5 * log_var)
        return self.decode(z), mu, log_var


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10)
        )
        self.decoder = nn.Sequential(
            nn.Linear(10, 72),
            nn.ReLU(),
            nn.Unflatten(1, (8, 3, 3)),
            nn.ConvTranspose2d(8, 8, 3, 2, 1, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 3, 2, 1, 1),
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


class SubPixel(nn.Module):
    """Super-resolution by a pixel shuffle (arXiv 1609.05158)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 12, 5, padding=2), nn.Conv2d(12, 12, 3, padding=1)
        self.conv3, self.shuffle = nn.Conv2d(12, 9, 3, padding=1), nn.PixelShuffle(3)

    def forward(self, x):
        return self.shuffle(self.conv3(F.relu(self.conv2(F.relu(self.conv1(x))))))


class Srcnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 12, 9, padding=4), nn.Conv2d(12, 8, 1)
        self.conv3 = nn.Conv2d(8, 1, 5, padding=2)

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
        return self.conv3(F.relu(self.conv2(F.relu(self.conv1(x)))))


class TimeUNet(nn.Module):
    """A denoiser of a diffusion model: sinusoids of the time step, group norm, attention over pixels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.register_buffer("freqs", torch.exp(-torch.arange(8) * 0.5))
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, width))
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.norm1, self.conv1 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.norm2, self.qkv = nn.GroupNorm(4, width), nn.Conv1d(width, 3 * width, 1)
        self.proj = nn.Conv1d(width, width, 1)

    def forward(self, x, t):
        angle = t[:, None] * self.freqs[None]
        time = self.time(torch.cat([angle.sin(), angle.cos()], dim=-1))
        h = self.first(x)
        h = h + self.conv1(F.silu(self.norm1(h) + time[:, :, None, None]))
        q, k, v = self.qkv(self.norm2(h).flatten(2)).chunk(3, dim=1)
        weight = torch.softmax(torch.einsum("bct,bcs->bts", q, k) * q.shape[1] ** -0.5, dim=-1)
        return self.last(h + self.proj(torch.einsum("bts,bcs->bct", weight, v)).view_as(h))


MODULES = {
    "style transfer": lambda: (StyleTransfer(), (torch.rand(2, 3, 12, 12),)),
    "u-net, transposed": lambda: (UNet(False), (torch.randn(2, 1, 16, 16),)),
    "u-net, upsampled": lambda: (UNet(True), (torch.randn(2, 1, 16, 16),)),
    "gan generator": lambda: (Generator(), (torch.randn(3, 16),)),
    "gan discriminator": lambda: (Discriminator(), (torch.randn(3, 3, 16, 16),)),
    "variational autoencoder": lambda: (VariationalAutoencoder(), (torch.rand(4, 32), torch.randn(4, 6))),
    "autoencoder": lambda: (Autoencoder(), (torch.rand(2, 1, 12, 12),)),
    "pixel shuffle": lambda: (SubPixel(), (torch.rand(2, 1, 8, 8),)),
    "srcnn": lambda: (Srcnn(), (torch.rand(2, 1, 8, 8),)),
    "diffusion denoiser": lambda: (TimeUNet(), (torch.randn(2, 3, 6, 6), torch.tensor([3.0, 17.0]))),
}
