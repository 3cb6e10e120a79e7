"""The LSTM language model of Zaremba et al. 2014 (arXiv:1409.2329)."""

from __future__ import annotations

from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph, Uniform

INIT = Uniform(-0.05, 0.05)


def lstm_lm(
    batch: int = 20,
    seq: int = 35,
    layers: int = 2,
    width: int = 650,
    vocabulary: int = 10000,
    dropout: float = 0.0,
) -> Graph:
    """The medium LSTM: `tokens` int64[batch,seq] → `logits` [batch,seq,vocabulary]; 19,780,400 parameters.

    Every sequence begins with a state of zeros. Dropout stands before, between and behind the layers; the paper's is
    0.5. The embedding and the output layer are drawn from U(±0.05), as there, its bias begins at 0, and the LSTM is
    drawn as `torch.nn.LSTM`. Names are those of the word language model among PyTorch's examples.
    """

    def model(tokens: Tensor) -> dict[str, Tensor]:
        x = nn.dropout(nn.embedding(tokens, vocabulary, width, name="encoder", weight_init=INIT), dropout)
        x, _ = nn.lstm(x, width, layers, dropout=dropout, name="rnn")
        x = nn.dropout(x, dropout)
        return {"logits": nn.linear(x, vocabulary, name="decoder", weight_init=INIT, bias_init=0.0)}

    return trace(model, spec((batch, seq), "int64"), name="lstm_lm")
