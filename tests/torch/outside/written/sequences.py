"""Networks over sequences: attention, recurrent cells, states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import utils

from tests.torch.outside.written.network import WORDS, drawn, integers, network, trained

# Attention.


@network(WORDS, inner=lambda: nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True))
def attention_with_both_masks(m: Any, x: Any) -> Any:
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return m.inner(x, x, x, key_padding_mask=padding, attn_mask=nn.Transformer.generate_square_subsequent_mask(5) < 0)


@network(WORDS, WORDS, inner=lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True, norm_first=True))
def encoder_and_decoder(m: Any, x: Any, y: Any) -> Any:
    return m.inner(x, y, tgt_is_causal=True, tgt_mask=nn.Transformer.generate_square_subsequent_mask(5))


@network(WORDS, qkv=lambda: nn.Linear(8, 24), bias=trained(2, 9), out=lambda: nn.Linear(8, 8))
def attention_with_relative_places(m: Any, x: Any) -> Any:
    q, k, v = m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
    steps = torch.arange(5)
    bias = m.bias[:, steps[:, None] - steps[None] + 4]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].expand(2, -1, -1, -1))
    return m.out(y.transpose(1, 2).flatten(2))


@network(WORDS, qkv=lambda: nn.Linear(8, 24))
def attention_of_slopes(m: Any, x: Any) -> Any:
    q, k, v = m.qkv(x).chunk(3, -1)
    slopes = torch.tensor([2.0**-4, 2.0**-8])[:, None, None]
    far = slopes * -(torch.arange(5)[:, None] - torch.arange(5)[None]).abs()
    scores = torch.einsum("bqhd,bkhd->bhqk", q.unflatten(-1, (2, 4)), k.unflatten(-1, (2, 4))) / 2 + far
    shares = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", shares, v.unflatten(-1, (2, 4))).reshape(2, 5, 8)


@network(WORDS, qkv=lambda: nn.Linear(8, 24, bias=False))
def rotated_places(m: Any, x: Any) -> Any:
    q, k, v = m.qkv(x).chunk(3, -1)
    angle = torch.outer(torch.arange(5.0), 10000.0 ** (-torch.arange(0, 8, 2) / 8))
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (4, 2))) * turn).flatten(-2) for y in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@network(WORDS, keys=lambda: nn.Linear(8, 8), values=lambda: nn.Linear(8, 8))
def linear_attention(m: Any, x: Any) -> Any:
    q, k = F.elu(x) + 1, F.elu(m.keys(x)) + 1
    state = torch.cumsum(k.unsqueeze(-1) * m.values(x).unsqueeze(-2), 1)
    return (q.unsqueeze(-2) @ state).squeeze(-2) / (q * k.cumsum(1)).sum(-1, keepdim=True)


@network(WORDS, latents=trained(3, 8), inner=lambda: nn.MultiheadAttention(8, 2, batch_first=True))
def read_by_latents(m: Any, x: Any) -> Any:
    return m.inner(m.latents.expand(2, -1, -1), x, x, need_weights=False)[0]


@network(WORDS, gate=lambda: nn.Linear(8, 4), up=trained(4, 8, 12), down=trained(4, 12, 8))
def experts_by_masks(m: Any, x: Any) -> Any:
    share, chosen = m.gate(x).softmax(-1).topk(2, -1)
    share = torch.zeros(2, 5, 4).scatter(-1, chosen, share / share.sum(-1, keepdim=True))
    return torch.einsum("bse,besd->bsd", share, torch.einsum("bsd,edh->besh", x, m.up).relu() @ m.down)


# Of sequences.


@network(WORDS, inner=lambda: nn.LSTM(8, 6, 2, bidirectional=True, batch_first=True, proj_size=3))
def projected_states(m: Any, x: Any) -> Any:
    y, (h, c) = m.inner(x)
    return y, h, c


@network(WORDS, inner=lambda: nn.GRU(8, 6, batch_first=True))
def packed_sequences(m: Any, x: Any) -> Any:
    packed = utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
    return utils.rnn.pad_packed_sequence(m.inner(packed)[0], batch_first=True)[0]


@network(WORDS, cell=lambda: nn.GRUCell(8, 8), out=lambda: nn.Linear(8, 8))
def cell_that_reads_itself(m: Any, x: Any) -> Any:
    state, outputs = torch.zeros(2, 8), []
    for step in range(5):
        state = m.cell(x[:, step] if step < 3 else m.out(state), state)
        outputs.append(state)
    return torch.stack(outputs, 1)


@network(WORDS, convs=lambda: nn.ModuleList([nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3)]))
def dilated_gates(m: Any, x: Any) -> Any:
    x, skipped = x.mT, 0
    for i, conv in enumerate(m.convs):
        y = F.glu(conv(F.pad(x, (2**i, 0))), 1)
        x, skipped = x + y, skipped + y
    return skipped


@network(WORDS, decay=trained(8, 4), b=lambda: nn.Linear(8, 4), c=lambda: nn.Linear(8, 4), step=lambda: nn.Linear(8, 8))
def selective_states(m: Any, x: Any) -> Any:
    step, b, c = F.softplus(m.step(x)), m.b(x), m.c(x)
    kept = torch.exp(step.unsqueeze(-1) * -torch.exp(m.decay))
    state, outputs = x.new_zeros(2, 8, 4), []
    for i in range(x.shape[1]):
        state = kept[:, i] * state + (step[:, i] * x[:, i]).unsqueeze(-1) * b[:, i].unsqueeze(1)
        outputs.append((state * c[:, i].unsqueeze(1)).sum(-1))
    return torch.stack(outputs, 1)


@network(WORDS, start=trained(4), moves=trained(4, 4), emit=lambda: nn.Linear(8, 4))
def best_paths_and_their_sum(m: Any, x: Any) -> Any:
    scores = m.emit(x)
    total = m.start + scores[:, 0]
    best = total
    for step in range(1, 5):
        total = torch.logsumexp(total.unsqueeze(2) + m.moves, 1) + scores[:, step]
        best = (best.unsqueeze(2) + m.moves).max(1).values + scores[:, step]
    return total.logsumexp(-1) - best.amax(-1)


@network(drawn(8, 2, 8), integers(5, 2, 3), inner=lambda: nn.Linear(8, 6))
def connectionist(m: Any, x: Any, words: Any) -> Any:
    return F.ctc_loss(m.inner(x).log_softmax(-1), words + 1, torch.tensor([8, 7]), torch.tensor([3, 2]))


@network(integers(9, 8), lambda: torch.tensor([0, 3, 3]), drawn(8), bag=lambda: nn.EmbeddingBag(9, 4, mode="sum"))
def bags_of_words(m: Any, words: Any, starts: Any, weights: Any) -> Any:
    return m.bag(words, starts, per_sample_weights=weights)


@network(drawn(2, 64), inner=lambda: nn.Linear(9, 9))
def spectrogram(m: Any, x: Any) -> Any:
    window = torch.hann_window(16)
    given = torch.stft(x, 16, 8, window=window, return_complex=True)
    kept = given * torch.sigmoid(m.inner(given.abs().mT)).mT
    return torch.istft(kept, 16, 8, window=window, length=64)
