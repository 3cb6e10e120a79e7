"""Networks over images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.torch.outside.written.network import IMAGES, network, trained


@network(IMAGES, conv=lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"))
def shuffled_pixels(m: Any, x: Any) -> Any:
    return F.pixel_unshuffle(F.pixel_shuffle(m.conv(x), 2), 4)


@network(IMAGES, weight=trained(6, 4, 3, 3))
def standardized_kernels(m: Any, x: Any) -> Any:
    var, mean = torch.var_mean(m.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
    return F.group_norm(F.conv2d(x, (m.weight - mean) * torch.rsqrt(var + 1e-5), padding=1), 2)


@network(IMAGES, kernels=trained(3, 5, 4, 3, 3), route=lambda: nn.Linear(4, 3))
def kernels_of_each_image(m: Any, x: Any) -> Any:
    shares = m.route(x.mean((2, 3))).softmax(-1)
    weight = torch.einsum("bk,koixy->boixy", shares, m.kernels).flatten(0, 1)
    return F.conv2d(x.reshape(1, 8, 8, 8), weight, padding=1, groups=2).view(2, 5, 8, 8)


@network(IMAGES, place=lambda: nn.Linear(4 * 64, 6))
def turned_images(m: Any, x: Any) -> Any:
    turn = m.place(x.flatten(1)).view(2, 2, 3) * 0.3 + torch.eye(2, 3)
    return F.grid_sample(x, F.affine_grid(turn, [2, 4, 6, 7], align_corners=False), align_corners=False)


@network(IMAGES, low=trained(4, 3, 3, 3), high=trained(4, 3, 3, 3))
def spectral_operator(m: Any, x: Any) -> Any:
    given, found = torch.fft.rfft2(x), torch.zeros(2, 3, 8, 5, dtype=torch.cfloat)
    found[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", given[:, :, :3, :3], torch.complex(m.low, m.high))
    return torch.fft.irfft2(found, s=(8, 8))


@network(IMAGES, pool=lambda: nn.MaxPool2d(2, return_indices=True), conv=lambda: nn.Conv2d(4, 4, 3, padding=1))
def pooled_and_back(m: Any, x: Any) -> Any:
    y, places = m.pool(m.conv(x))
    return F.max_unpool2d(y.tanh(), places, 2)


@network(IMAGES, conv=lambda: nn.Conv2d(4, 3, 3, padding=1))
def places_of_peaks(m: Any, x: Any) -> Any:
    shares = m.conv(x).flatten(2).softmax(-1).unflatten(-1, (8, 8))
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8), indexing="ij")
    return torch.stack([(shares * rows).sum((2, 3)), (shares * columns).sum((2, 3))], -1)


@network(
    IMAGES, norm=lambda: nn.BatchNorm2d(4, momentum=None), other=lambda: nn.InstanceNorm2d(4, track_running_stats=True)
)
def statistics_of_all_batches(m: Any, x: Any) -> Any:
    return m.norm(x) + m.other(x)


@network(IMAGES, a=lambda: nn.Conv2d(4, 4, 3, padding="same", bias=False), b=lambda: nn.ConvTranspose2d(4, 2, 2, 2))
def resized_in_many_ways(m: Any, x: Any) -> Any:
    y = F.interpolate(m.a(x), scale_factor=1.5, mode="bicubic", align_corners=False, antialias=True)
    return y + F.interpolate(x, size=12, mode="area"), m.b(F.adaptive_max_pool2d(x, (3, 5)))
