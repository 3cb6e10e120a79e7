"""Networks over tokens, with their ways to say where a token stands."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class BertEmbeddings(nn.Module):
    def __init__(self, words: int, width: int, most: int = 24) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(words, width, padding_idx=0)
        self.position_embeddings, self.token_type_embeddings = nn.Embedding(most, width), nn.Embedding(2, width)
        self.LayerNorm, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)
        self.register_buffer("position_ids", torch.arange(most).expand((1, -1)), persistent=False)
        self.register_buffer("token_type_ids", torch.zeros(1, most, dtype=torch.long), persistent=False)

    def forward(self, tokens):
        length = tokens.size(1)
        kinds = self.token_type_ids[:, :length].expand(tokens.shape)
        x = self.word_embeddings(tokens) + self.token_type_embeddings(kinds)
        return self.dropout(self.LayerNorm(x + self.position_embeddings(self.position_ids[:, :length])))


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.dense, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width)
        self.fc1, self.fc2, self.norm2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x, mask):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + mask
        y = (torch.softmax(scores, dim=-1) @ v).permute(0, 2, 1, 3).contiguous().view(x.shape)
        x = self.norm1(x + self.dense(y))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class Bert(nn.Module):
    def __init__(self, words: int = 40, width: int = 16) -> None:
        super().__init__()
        self.embeddings, self.layer = BertEmbeddings(words, width), BertLayer(width, 2)
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, tokens, attention_mask):
        mask = (1.0 - attention_mask[:, None, None, :].float()) * -10000.0
        x = self.layer(self.embeddings(tokens), mask)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


class CausalAttention(nn.Module):
    """As in nanoGPT: one layer for query, key and value, and a buffer `bias` that holds the mask."""

    def __init__(self, width: int, heads: int, most: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(most, most)).view(1, 1, most, most))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (each.view(b, t, self.heads, c // self.heads).transpose(1, 2) for each in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))


class Gpt(nn.Module):
    def __init__(self, tied: bool, words: int = 40, width: int = 16, most: int = 12) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(most, width)
        self.ln_1, self.attn = nn.LayerNorm(width), CausalAttention(width, 2, most)
        self.ln_2, self.fc, self.proj = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(0, tokens.size(1)))
        x = x + self.attn(self.ln_1(x))
        x = x + self.proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))
        return self.lm_head(self.ln_f(x))


def sinusoids(most: int, width: int) -> torch.Tensor:
    position = torch.arange(most).unsqueeze(1)
    factor = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    table = torch.zeros(most, width)
    table[:, 0::2], table[:, 1::2] = torch.sin(position * factor), torch.cos(position * factor)
    return table


class PositionalEncoding(nn.Module):
    """PyTorch's tutorial: a buffer `pe`."""

    def __init__(self, width: int, most: int = 32) -> None:
        super().__init__()
        self.register_buffer("pe", sinusoids(most, width).unsqueeze(0))

    def forward(self, x):
        return x + self.pe[:, : x.size(1)]


class PlainPositions(nn.Module):
    """The same table as an attribute: neither a buffer nor a parameter."""

    def __init__(self, width: int, most: int = 32) -> None:
        super().__init__()
        self.pe = sinusoids(most, width)

    def forward(self, x):
        return x + self.pe[: x.size(1)]


class TransformerClassifier(nn.Module):
    def __init__(self, positions: type[nn.Module], width: int = 16) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(30, width), positions(width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.out = nn.Linear(width, 4)
        self.scale = math.sqrt(width)

    def forward(self, tokens):
        x = self.layer(self.positions(self.embed(tokens) * self.scale))
        return self.out(x.mean(dim=1))


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class Rotary(nn.Module):
    """Angles by buffers: of cosines and sines, or of inverse frequencies from which they are computed."""

    def __init__(self, width: int, stored: bool, most: int = 16) -> None:
        super().__init__()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
        self.stored = stored
        if stored:
            angle = torch.outer(torch.arange(most).float(), inv_freq)
            angle = torch.cat((angle, angle), dim=-1)
            self.register_buffer("cos_cached", angle.cos()[None, None])
            self.register_buffer("sin_cached", angle.sin()[None, None])
        else:
            self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, length):
        if self.stored:
            return self.cos_cached[:, :, :length], self.sin_cached[:, :, :length]
        angle = torch.outer(torch.arange(length).float(), self.inv_freq)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()


class Llama(nn.Module):
    """Rotary positions, two queries for each key and value, RMS norm and SwiGLU."""

    def __init__(self, stored: bool, words: int = 30, width: int = 16, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, width)
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.input_layernorm, self.post_attention_layernorm, self.norm = RmsNorm(width), RmsNorm(width), RmsNorm(width)
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(width, 24, bias=False), nn.Linear(width, 24, bias=False)
        self.down_proj, self.lm_head = nn.Linear(24, width, bias=False), nn.Linear(width, words, bias=False)
        self.rotary = Rotary(self.size, stored)

    def attend(self, x):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.groups, self.size).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.groups, self.size).transpose(1, 2)
        cos, sin = self.rotary(t)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k, v = (each.repeat_interleave(self.heads // self.groups, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        x = x + self.attend(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        x = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return self.lm_head(self.norm(x))


class Alibi(nn.Module):
    """Slopes times distances are added to the scores (arXiv 2108.12409)."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.qkv, self.out = nn.Embedding(30, width), nn.Linear(width, 3 * width), nn.Linear(width, 30)
        self.register_buffer("slopes", 2.0 ** (-8 / heads * torch.arange(1, heads + 1)))

    def forward(self, tokens):
        x = self.embed(tokens)
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        position = torch.arange(t)
        distance = (position[None, :] - position[:, None]).float()
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + self.slopes[:, None, None] * distance
        scores = scores + torch.triu(torch.full((t, t), float("-inf")), diagonal=1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class RelativeBias(nn.Module):
    """T5's: an embedding of buckets of distances, which are a buffer of integers."""

    def __init__(self, width: int = 16, heads: int = 2, most: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(30, width)
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.relative_attention_bias, self.norm = nn.Embedding(8, heads), RmsNorm(width)
        distance = torch.arange(most)[None] - torch.arange(most)[:, None]
        self.register_buffer("buckets", (distance.abs().clamp(max=3) + (distance > 0) * 4).long())

    def forward(self, tokens):
        x = self.embed(tokens)
        b, t, c = x.shape
        y = self.norm(x)
        q, k, v = (f(y).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        bias = self.relative_attention_bias(self.buckets[:t, :t]).permute(2, 0, 1).unsqueeze(0)
        y = torch.softmax(q @ k.transpose(3, 2) + bias, dim=-1) @ v
        return x + self.o(y.transpose(1, 2).contiguous().view(b, t, c))


class Translator(nn.Module):
    """An encoder and a decoder of torch.nn with a causal mask."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(30, width), nn.Embedding(30, width)
        self.positions = PositionalEncoding(width)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 24, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, 2, 24, batch_first=True, norm_first=True)
        self.out = nn.Linear(width, 30)

    def forward(self, source, target):
        memory = self.encoder(self.positions(self.source(source)))
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        return self.out(self.decoder(self.positions(self.target(target)), memory, tgt_mask=mask))


def _tokens(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape)


MODULES = {
    "bert": lambda: (Bert(), (1 + _tokens(39, 2, 8), torch.tensor([[1] * 8, [1] * 5 + [0] * 3]))),
    "gpt": lambda: (Gpt(False), (_tokens(40, 2, 8),)),
    "gpt, tied": lambda: (Gpt(True), (_tokens(40, 2, 8),)),
    "sinusoids in a buffer": lambda: (TransformerClassifier(PositionalEncoding), (_tokens(30, 2, 8),)),
    "sinusoids in an attribute": lambda: (TransformerClassifier(PlainPositions), (_tokens(30, 2, 8),)),
    "llama, stored cosines": lambda: (Llama(True), (_tokens(30, 2, 8),)),
    "llama, frequencies": lambda: (Llama(False), (_tokens(30, 2, 8),)),
    "alibi": lambda: (Alibi(), (_tokens(30, 2, 8),)),
    "t5 relative bias": lambda: (RelativeBias(), (_tokens(30, 2, 8),)),
    "translator": lambda: (Translator(), (_tokens(30, 2, 7), _tokens(30, 2, 5))),
}
