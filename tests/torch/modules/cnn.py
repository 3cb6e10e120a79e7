"""Convolutional networks that classify."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def conv_bn(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1, act=nn.ReLU) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs), act()
    )


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 12, 5)
        self.fc1, self.fc2 = nn.Linear(12 * 4, 24), nn.Linear(24, 10)

    def forward(self, x):
        x = F.avg_pool2d(torch.tanh(self.conv1(x)), 2)
        x = F.avg_pool2d(torch.tanh(self.conv2(x)), 2)
        return self.fc2(torch.tanh(self.fc1(x.view(x.size(0), -1))))


class Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width in (8, 16):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
            inputs = width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Linear(64, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 10))

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + identity)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, width * 4, 1, bias=False), nn.BatchNorm2d(width * 4)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, width * 4, 1, stride, bias=False), nn.BatchNorm2d(width * 4))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, *blocks: nn.Module, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, 10)

    def forward(self, x):
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        return self.fc(F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1))


class DenseNet(nn.Module):
    def __init__(self, growth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.layers = nn.ModuleList()
        width = 8
        for _ in range(3):
            self.layers.append(
                nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 3, padding=1, bias=False))
            )
            width += growth
        self.transition = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)
        )
        self.norm, self.classifier = nn.BatchNorm2d(width // 2), nn.Linear(width // 2, 10)

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        x = F.relu(self.norm(self.transition(torch.cat(features, 1))))
        return self.classifier(F.adaptive_avg_pool2d(x, (1, 1)).flatten(1))


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = conv_bn(8, 6, 1)
        self.three = nn.Sequential(conv_bn(8, 4, 1), conv_bn(4, 6, 3))
        self.five = nn.Sequential(conv_bn(8, 4, 1), conv_bn(4, 6, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_bn(8, 6, 1))
        self.stem, self.fc = conv_bn(3, 8, 3), nn.Linear(24, 10)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)
        return self.fc(x.mean([2, 3]))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, act=nn.ReLU, gate=nn.Sigmoid) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)
        self.act, self.gate = act(), gate()

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * self.gate(self.fc2(self.act(self.fc1(scale))))


class InvertedResidual(nn.Module):
    """Of MobileNet V3 and of EfficientNet: expand, a convolution a channel, squeeze and excite, project."""

    def __init__(self, width: int, expand: int, act, gate) -> None:
        super().__init__()
        self.block = nn.Sequential(
            conv_bn(width, width * expand, 1, act=act),
            conv_bn(width * expand, width * expand, 3, groups=width * expand, act=act),
            SqueezeExcite(width * expand, act, gate),
            nn.Conv2d(width * expand, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return x + self.block(x)


class MobileNet(nn.Module):
    def __init__(self, act=nn.Hardswish, gate=nn.Hardsigmoid) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8, 3, 2, act=act)
        self.blocks = nn.Sequential(*(InvertedResidual(8, 4, act, gate) for _ in range(2)))
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class SqueezeAndExcite(nn.Module):
    """Its gate by linear layers, reshaped to the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 16, 3), nn.Linear(16, 3)
        self.fc = nn.Sequential(nn.Linear(16, 4, bias=False), nn.ReLU(), nn.Linear(4, 16, bias=False), nn.Sigmoid())

    def forward(self, x):
        x = self.conv(x)
        b, c, _, _ = x.shape
        x = x * self.fc(x.mean(dim=(2, 3))).view(b, c, 1, 1).expand_as(x)
        return self.out(x.amax(dim=(2, 3)))


class ConvNextBlock(nn.Module):
    """Layer norm over channels that lie last, and a layer scale `gamma` (arXiv 2201.03545)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, x):
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


class ChannelsFirstNorm(nn.Module):
    """The layer norm of ConvNeXt's downsampling, written out over axis 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 2, stride=2), ChannelsFirstNorm(12))
        self.blocks = nn.Sequential(ConvNextBlock(12), ConvNextBlock(12))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.stem(x)).mean([-2, -1])))


class ShuffleNet(nn.Module):
    """Half of the channels pass, the others are convolved, then both are shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 16, 3)
        self.branch = nn.Sequential(
            conv_bn(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), conv_bn(8, 8, 1)
        )
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        a, b = self.stem(x).chunk(2, dim=1)
        x = torch.cat((a, self.branch(b)), dim=1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)
        return self.fc(x.mean([2, 3]))


class GroupNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.GroupNorm(3, 12)
        self.conv2, self.norm2 = nn.Conv2d(12, 12, 3, padding=1, bias=False), nn.GroupNorm(1, 12)
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        x = F.silu(self.norm1(self.conv1(x)))
        x = x + F.silu(self.norm2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class StandardizedConv(nn.Conv2d):
    """Weight standardisation (arXiv 1903.10520)."""

    def forward(self, x):
        w = self.weight
        mean = w.mean(dim=(1, 2, 3), keepdim=True)
        std = w.std(dim=(1, 2, 3), keepdim=True) + 1e-5
        return F.conv2d(x, (w - mean) / std, self.bias, self.stride, self.padding)


class WeightStandardized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = StandardizedConv(3, 12, 3, padding=1), nn.GroupNorm(4, 12)
        self.conv2, self.norm2 = StandardizedConv(12, 12, 3, padding=1), nn.GroupNorm(4, 12)
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        return self.fc(F.relu(self.norm2(self.conv2(x))).mean((2, 3)))


class Conv3dNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv3d(1, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(6, 8, 3), nn.ReLU()
        )
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.net(x).mean((2, 3, 4)))


class ConvPRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.act1 = nn.Conv2d(3, 10, 3), nn.PReLU(10)
        self.conv2, self.act2 = nn.Conv2d(10, 10, 3, stride=2), nn.PReLU()
        self.fc = nn.Linear(10, 4)

    def forward(self, x):
        return self.fc(self.act2(self.conv2(self.act1(self.conv1(x)))).mean((2, 3)))


def _images(size: int = 16, batch: int = 2) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 3, size, size),)


MODULES = {
    "lenet": lambda: (LeNet(), (torch.randn(2, 1, 16, 16),)),
    "vgg": lambda: (Vgg(), _images()),
    "resnet, basic blocks": lambda: (ResNet(BasicBlock(8, 8), BasicBlock(8, 16, 2), width=16), _images(32)),
    "resnet, bottlenecks": lambda: (ResNet(Bottleneck(8, 4), Bottleneck(16, 4, 2), width=16), _images(32)),
    "resnext": lambda: (ResNet(Bottleneck(8, 8, groups=4), width=32), _images(32)),
    "densenet": lambda: (DenseNet(), _images()),
    "inception": lambda: (Inception(), _images()),
    "mobilenet v3": lambda: (MobileNet(), _images()),
    "efficientnet": lambda: (MobileNet(nn.SiLU, nn.Sigmoid), _images()),
    "squeeze excite": lambda: (SqueezeAndExcite(), _images(10)),
    "convnext": lambda: (ConvNext(), _images()),
    "shufflenet": lambda: (ShuffleNet(), _images(10)),
    "group norm net": lambda: (GroupNormNet(), _images(10)),
    "weight standardized conv": lambda: (WeightStandardized(), _images(10)),
    "3-d convolutions": lambda: (Conv3dNet(), (torch.randn(2, 1, 8, 8, 8),)),
    "cnn with prelu": lambda: (ConvPRelu(), _images(10)),
}
