"""Attention over what is not a text, and what stands in its place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, width * 3), nn.Linear(width, width)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attn = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 10, width) * 0.02)
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, 2)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        x = x + self.attn(self.norm1(x))
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.head(self.norm(x)[:, 0])


class EncoderLayer(nn.Module):
    """torch.nn's own, in both orders of its norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, activation="gelu", batch_first=True)
        self.second = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.1, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.second(self.first(x))


class MultiheadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 3)

    def forward(self, query, memory):
        y, weights = self.attention(query, memory, memory)
        return self.out(y), weights


class SeparateAttention(nn.Module):
    """Keys and values of other widths, and learned ones that are appended to them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, kdim=10, vdim=12, add_bias_kv=True, batch_first=True)

    def forward(self, query, key, value):
        return self.attention(query, key, value, need_weights=False)[0]


class SwinBlock(nn.Module):
    """Shifted windows: a mask in a buffer, and a table of relative positions (arXiv 2103.14030)."""

    def __init__(self, width: int = 12, heads: int = 2, size: int = 8, window: int = 4) -> None:
        super().__init__()
        self.size, self.window, self.heads, self.shift = size, window, heads, window // 2
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)
        place = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = (place[:, :, None] - place[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("relative_position_index", relative[..., 0] * (2 * window - 1) + relative[..., 1])
        region = torch.zeros(1, size, size, 1)
        parts = (slice(0, -window), slice(-window, -self.shift), slice(-self.shift, None))
        for i, (rows, columns) in enumerate((a, b) for a in parts for b in parts):
            region[:, rows, columns] = i
        region = self.windows(region).squeeze(-1)
        self.register_buffer("attn_mask", (region.unsqueeze(1) != region.unsqueeze(2)).float() * -100.0)

    def windows(self, x):
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, c)

    def forward(self, x):
        b, n, c = x.shape
        y = self.norm1(x).view(b, self.size, self.size, c)
        y = self.windows(torch.roll(y, (-self.shift, -self.shift), (1, 2)))
        q, k, v = self.qkv(y).view(y.shape[0], -1, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = q * (c // self.heads) ** -0.5 @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        attn = attn + bias.view(self.window**2, self.window**2, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        count = self.attn_mask.shape[0]
        attn = attn.view(b, count, self.heads, *attn.shape[-2:]) + self.attn_mask.unsqueeze(1).unsqueeze(0)
        attn = attn.view(-1, *attn.shape[2:]).softmax(dim=-1)
        y = self.proj((attn @ v).transpose(1, 2).reshape(-1, self.window**2, c))
        side = self.size // self.window
        y = y.view(b, side, side, self.window, self.window, c).permute(0, 1, 3, 2, 4, 5)
        y = torch.roll(y.reshape(b, self.size, self.size, c), (self.shift, self.shift), (1, 2))
        x = x + y.reshape(b, n, c)
        return x + self.mlp(self.norm2(x))


class LinearAttention(nn.Module):
    """Keys and values are summed first (arXiv 2006.16236)."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (each.view(b, n, self.heads, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        z = 1 / (torch.einsum("bhnd,bhd->bhn", q, k.sum(dim=2)) + 1e-6)
        y = torch.einsum("bhnd,bhde,bhn->bhne", q, torch.einsum("bhnd,bhne->bhde", k, v), z)
        return self.out(y.transpose(1, 2).reshape(b, n, c))


class Perceiver(nn.Module):
    """Learned latents ask an input of any length (arXiv 2103.03206)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(6, width) * 0.02)
        self.norm_x, self.norm_latents = nn.LayerNorm(10), nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(10, 2 * width, bias=False)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x):
        latents = self.latents.unsqueeze(0).repeat(x.shape[0], 1, 1)
        k, v = self.kv(self.norm_x(x)).chunk(2, dim=-1)
        scores = self.q(self.norm_latents(latents)) @ k.transpose(1, 2) * 0.25
        latents = latents + self.out(torch.softmax(scores, dim=-1) @ v)
        return self.head(latents.mean(dim=1))


class Clip(nn.Module):
    """Two towers, cosines of all pairs, and a learned logarithm of their scale."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 12))
        self.words = nn.Embedding(30, 16)
        self.positional_embedding = nn.Parameter(torch.randn(6, 16) * 0.01)
        self.text_projection = nn.Parameter(torch.randn(16, 12) * 0.25)
        self.ln_final = nn.LayerNorm(16)
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.6592)

    def forward(self, image, text):
        a = self.image(image)
        b = self.ln_final(self.words(text) + self.positional_embedding)[:, -1] @ self.text_projection
        a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)
        logits = self.logit_scale.exp() * a @ b.t()
        return logits, logits.t()


class MlpMixer(nn.Module):
    def __init__(self, width: int = 12, patches: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.norm1, self.norm2, self.norm = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 24), nn.GELU(), nn.Linear(24, patches))
        self.channels = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(self.norm(x).mean(dim=1))


class GatedMlp(nn.Module):
    """A spatial gating unit, whose product over positions is a 1-d convolution (arXiv 2105.08050)."""

    def __init__(self, width: int = 12, length: int = 8) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(16, width)
        self.gate_norm, self.spatial = nn.LayerNorm(16), nn.Conv1d(length, length, 1)
        nn.init.constant_(self.spatial.bias, 1.0)

    def forward(self, x):
        u, v = F.gelu(self.fc1(self.norm(x))).chunk(2, dim=-1)
        return x + self.fc2(u * self.spatial(self.gate_norm(v)))


class AttentionPooling(nn.Module):
    """One learned vector weighs the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 12), nn.Linear(12, 3)
        self.attention = nn.Parameter(torch.randn(12))

    def forward(self, x):
        h = torch.tanh(self.fc(x))
        weights = torch.softmax(torch.matmul(h, self.attention), dim=1)
        return self.out((h * weights.unsqueeze(-1)).sum(dim=1))


class LayerScale(nn.Module):
    """CaiT's blocks: a vector a branch; queries and keys are normalised and have a learned scale a head."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(heads, 1, 1)))
        self.gamma_1, self.gamma_2 = nn.Parameter(1e-4 * torch.ones(width)), nn.Parameter(1e-4 * torch.ones(width))
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        b, n, c = x.shape
        bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        qkv = F.linear(self.norm(x), self.qkv.weight, bias).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = (attn * torch.clamp(self.logit_scale, max=4.6052).exp()).softmax(dim=-1)
        x = x + self.gamma_1 * self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))
        return x + self.gamma_2 * F.gelu(self.fc(x))


MODULES = {
    "vit": lambda: (VisionTransformer(), (torch.randn(2, 3, 12, 12),)),
    "transformer encoder layers": lambda: (EncoderLayer(), (torch.randn(2, 6, 16),)),
    "multihead attention": lambda: (MultiheadAttention(), (torch.randn(2, 5, 16), torch.randn(2, 7, 16))),
    "attention of other widths": lambda: (
        SeparateAttention(),
        (torch.randn(2, 5, 16), torch.randn(2, 7, 10), torch.randn(2, 7, 12)),
    ),
    "swin block": lambda: (SwinBlock(), (torch.randn(2, 64, 12),)),
    "linear attention": lambda: (LinearAttention(), (torch.randn(2, 7, 16),)),
    "perceiver": lambda: (Perceiver(), (torch.randn(2, 9, 10),)),
    "clip": lambda: (Clip(), (torch.randn(3, 3, 8, 8), torch.randint(0, 30, (3, 6)))),
    "mlp-mixer": lambda: (MlpMixer(), (torch.randn(2, 3, 16, 16),)),
    "gated mlp": lambda: (GatedMlp(), (torch.randn(2, 8, 12),)),
    "attention pooling": lambda: (AttentionPooling(), (torch.randn(3, 6, 8),)),
    "layer scale": lambda: (LayerScale(), (torch.randn(2, 6, 16),)),
}
