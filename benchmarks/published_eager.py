"""What `fp.eager_memory` counts for steps of PyTorch whose memory others have published.

    python -m benchmarks.published_eager

The models are transformers' Llama, in the sizes of the sources, on the device `meta`. Loops are those of the sources:
LoRA of queries and values in weights of bf16 (litgpt), FSDP2 with torchtitan's selection of what is recomputed, and all
layers checkpointed (llama-cookbook, whose sequence is assumed). Nothing is tuned. Writes the table between the marks in
`docs/beside-pytorch.md`.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import foreplan as fp
import tests.torch.conftest  # noqa: F401

PAGE = Path(__file__).resolve().parents[1] / "docs" / "beside-pytorch.md"
MARKS = "<!-- published -->\n{}<!-- /published -->\n"
GB, GIB = 10**9, 1 << 30
LITGPT = "[litgpt](https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md)"
TITAN = "[torchtitan](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)"
COOKBOOK = "[llama-cookbook #25](https://github.com/meta-llama/llama-cookbook/issues/25)"
SIZES = {
    "Llama 2 7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Llama 2 13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
                    "num_attention_heads": 40},
    "Llama 3.1 8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A published figure, in units of bytes; `how`: LoRA, or what is recomputed."""

    source: str
    model: str
    ranks: int
    batch: int
    sequence: int
    how: str
    published: float
    unit: int


ROWS = (
    Row(LITGPT, "Llama 2 7B", 1, 1, 1304, "LoRA 8", 21.30, GB),
    Row(LITGPT, "Llama 2 7B", 1, 2, 1304, "LoRA 8", 29.07, GB),
    Row(LITGPT, "Llama 2 13B", 1, 1, 1304, "LoRA 8", 38.12, GB),
    Row(TITAN, "Llama 3.1 8B", 8, 2, 8192, "selective", 82.4, GIB),
    Row(TITAN, "Llama 3.1 8B", 128, 2, 8192, "selective", 67.0, GIB),
    Row(COOKBOOK, "Llama 2 13B", 8, 4, 2048, "all layers", 48.0, GB),
)


class Adapted(nn.Module):
    """A linear layer with a LoRA adapter of rank 8."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.dropout = layer, nn.Dropout(0.05)
        self.down = nn.Parameter(torch.empty(8, layer.in_features, dtype=layer.weight.dtype, device="meta"))
        self.up = nn.Parameter(torch.empty(layer.out_features, 8, dtype=layer.weight.dtype, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + (self.dropout(x) @ self.down.T @ self.up.T) * 2.0


class Selective(nn.Module):
    """A layer of which attention and every second product are kept, as torchtitan has it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.layer, *args, use_reentrant=False, context_fn=_kept, **kwargs)


def _kept() -> Any:
    mm, count = torch.ops.aten.mm.default, {False: 0, True: 0}
    attention = (
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
    )

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        count[context.is_recompute] += func == mm
        kept = func in attention or (func == mm and count[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def model_of(row: Row) -> Any:
    """The model as the source trains it."""
    import transformers

    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES[row.model]))
    if row.how.startswith("LoRA"):
        model = model.to(torch.bfloat16).requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
            layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    elif row.how == "selective":
        model.model.layers = nn.ModuleList(Selective(layer) for layer in model.model.layers)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def counted(row: Row) -> fp.eager.Eager:
    """The step."""
    wide = row.ranks > 1  # torchtitan makes logits float32 before the loss

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        logits = output.logits.flatten(0, -2)
        return F.cross_entropy(logits.float() if wide else logits, target.flatten())

    tokens = torch.zeros(row.batch, row.sequence, dtype=torch.int64)
    return fp.eager_memory(
        model_of(row),
        kwargs={"input_ids": tokens, "use_cache": False},
        loss=loss,
        loss_inputs=tokens,
        optimizer=torch.optim.AdamW,
        precision="bf16" if row.ranks > 1 else "float32",
        target="cuda:a100",
        ranks=row.ranks,
        shard=["model.layers.*"] if row.ranks > 1 else (),
    )


def main() -> None:
    """The table."""
    warnings.filterwarnings("ignore")
    lines = [
        "| source | model, cards, batch × sequence | recomputed | published | allocated | reserved | off |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        eager = counted(row)
        allocated = max(each.most_allocated for each in eager.replayed) / row.unit
        reserved = max(each.reserved for each in eager.replayed) / row.unit
        name = "GB" if row.unit == GB else "GiB"
        off = f"{reserved / row.published - 1:+.1%}".replace("-", "−").replace("%", " %")
        star = " *" if row.source == COOKBOOK else ""
        how = "nothing" if row.how.startswith("LoRA") else row.how
        model = f"{row.model}, LoRA 8" if row.how.startswith("LoRA") else row.model
        shape = f"{row.ranks}, {row.batch} × {row.sequence:,}{star}"
        lines.append(
            f"| {row.source} | {model}, {shape} | {how} | {row.published:.2f} {name} | {allocated:.2f} | "
            f"{reserved:.2f} | {off} |"
        )
        print(lines[-1], flush=True)
    text, table = PAGE.read_text(), MARKS.format("\n".join(lines) + "\n")
    PAGE.write_text(re.sub(MARKS.format(".*?"), lambda _: table, text, flags=re.S))


if __name__ == "__main__":
    main()
