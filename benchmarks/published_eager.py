"""What `fp.eager_memory` counts for steps of PyTorch whose memory others have published.

    python -m benchmarks.published_eager

The models are transformers', in the sizes of the sources, on the device `meta`; litgpt's and Megatron-LM's are written
anew, from what their sources do. Loops are those of the sources: LoRA (litgpt, Qwen), FSDP2 with torchtitan's selection
of what is recomputed, all layers checkpointed, and Megatron-LM's distributed optimizer. Nothing is tuned. Writes the
table between the marks in `docs/beside-pytorch.md`.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import foreplan as fp
import tests.torch.conftest  # noqa: F401
from benchmarks import published_litgpt, published_megatron
from benchmarks.published_litgpt import Sizes

PAGE = Path(__file__).resolve().parents[1] / "docs" / "beside-pytorch.md"
MARKS = "<!-- published -->\n{}<!-- /published -->\n"
GB, GIB = 10**9, 1 << 30
LITGPT = "[litgpt](https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md)"
TITAN = "[torchtitan](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)"
TITAN_165 = "[torchtitan #165](https://github.com/pytorch/torchtitan/pull/165)"
TITAN_929 = "[torchtitan #929](https://github.com/pytorch/torchtitan/issues/929), compiled"
TITAN_1287 = "[torchtitan #1287](https://github.com/pytorch/torchtitan/pull/1287)"
MEGATRON = "[Megatron-LM #482](https://github.com/NVIDIA/Megatron-LM/pull/482)"
COOKBOOK = "[llama-cookbook #25](https://github.com/meta-llama/llama-cookbook/issues/25)"
QWEN = "[Qwen](https://github.com/QwenLM/Qwen/blob/main/README.md)"
H100 = 95.0396  # GiB of the card, of which #165 gives shares
LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
SIZES = {
    "Llama 2 7B": LLAMA_7B,
    "Llama 2 13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
                    "num_attention_heads": 40},
    "Llama 3.1 8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "Qwen 7B": LLAMA_7B | {"num_key_value_heads": 32, "vocab_size": 151936},
}  # fmt: skip
LITGPT_SIZES = {
    "Llama 2 7B": Sizes(32, 4096, 32, 11008, 32000),
    "Llama 2 13B": Sizes(40, 5120, 40, 13824, 32000),
    "phi-1.5": Sizes(24, 2048, 32, 8192, 51200, rotated=0.5, gated=False, shared=True),
    "StableLM Alpha 3B": Sizes(16, 4096, 32, 16384, 50688, rotated=0.25, gated=False),
}


@dataclass(frozen=True)
class Row:
    """A published figure, in units of bytes.

    Attributes:
        how: LoRA's rank, or what is recomputed.
        counts: what the figure is of: allocated or reserved bytes.
        kept: whether the loop keeps the logits while it goes backward.
    """

    source: str
    model: str
    ranks: int
    batch: int
    sequence: int
    how: str
    published: float
    unit: int
    counts: str = "reserved"
    kept: bool = False


def _litgpt(model: str, batch: int, sequence: int, published: float) -> Row:
    return Row(LITGPT, model, 1, batch, sequence, "LoRA 8", published, GB, "allocated", True)


ROWS = (
    _litgpt("phi-1.5", 1, 1044, 4.82),
    _litgpt("phi-1.5", 2, 1044, 6.76),
    _litgpt("phi-1.5", 4, 1044, 10.68),
    _litgpt("StableLM Alpha 3B", 1, 1034, 9.69),
    _litgpt("StableLM Alpha 3B", 2, 1034, 12.10),
    _litgpt("StableLM Alpha 3B", 4, 1034, 16.92),
    _litgpt("Llama 2 7B", 1, 1304, 21.30),
    _litgpt("Llama 2 7B", 2, 1304, 29.07),
    _litgpt("Llama 2 13B", 1, 1304, 38.12),
    Row(MEGATRON, "Llama 2 7B", 8, 2, 2048, "nothing", 69.1, GIB, "allocated"),
    Row(TITAN, "Llama 3.1 8B", 8, 2, 8192, "selective", 82.4, GIB),
    Row(TITAN, "Llama 3.1 8B", 128, 2, 8192, "selective", 67.0, GIB),
    Row(TITAN_1287, "Llama 3.1 8B", 8, 1, 8192, "selective", 49.66, GIB),
    Row(TITAN_929, "Llama 3.1 8B", 8, 1, 8192, "selective", 47.65, GIB),
    Row(TITAN_165, "Llama 2 7B", 8, 8, 2048, "selective", 0.5213 * H100, GIB, "allocated", True),
    Row(TITAN_165, "Llama 2 7B", 8, 8, 2048, "selective", 0.6251 * H100, GIB, "reserved", True),
    Row(TITAN_165, "Llama 2 7B", 8, 8, 2048, "all layers", 0.2392 * H100, GIB, "allocated", True),
    Row(TITAN_165, "Llama 2 7B", 8, 8, 2048, "all layers", 0.3264 * H100, GIB, "reserved", True),
    Row(COOKBOOK, "Llama 2 13B", 8, 4, 2048, "all layers", 48.0, GB),
    Row(QWEN, "Qwen 7B", 1, 1, 256, "all layers, LoRA 64", 20.1, GB),
    Row(QWEN, "Qwen 7B", 1, 1, 1024, "all layers, LoRA 64", 21.5, GB),
    Row(QWEN, "Qwen 7B", 1, 1, 4096, "all layers, LoRA 64", 29.7, GB),
    Row(QWEN, "Qwen 7B", 1, 1, 8192, "all layers, LoRA 64", 36.6, GB),
)
UNSAID = (COOKBOOK, QWEN)  # the sequence, or what is counted


class Adapted(nn.Module):
    """A linear layer with a LoRA adapter of rank 64, as Qwen's have."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.dropout = layer, nn.Dropout(0.05)
        self.down = nn.Parameter(torch.empty(64, layer.in_features, dtype=layer.weight.dtype, device="meta"))
        self.up = nn.Parameter(torch.empty(layer.out_features, 64, dtype=layer.weight.dtype, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + F.linear(F.linear(self.dropout(x), self.down), self.up) * 0.25


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
        if row.source == LITGPT:
            return published_litgpt.LitGPT(LITGPT_SIZES[row.model], row.sequence)
        if row.source == MEGATRON:
            return published_megatron.GPT().to(torch.bfloat16)
        family = "Qwen2" if row.source == QWEN else "Llama"
        config = getattr(transformers, f"{family}Config")(**SIZES[row.model], max_position_embeddings=8192)
        model: Any = getattr(transformers, f"{family}ForCausalLM")(config)
    if row.source == QWEN:
        model = model.to(torch.bfloat16).requires_grad_(False)
        for part in [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]:
            for name, layer in list(part.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(part, name, Adapted(layer))
        model.enable_input_require_grads()
    if row.how == "selective":
        model.model.layers = nn.ModuleList(Selective(layer) for layer in model.model.layers)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@cache
def counted(model: str, source: str, ranks: int, batch: int, sequence: int, how: str, kept: bool) -> fp.eager.Eager:
    """The step."""
    row = Row(source, model, ranks, batch, sequence, how, 0, 1)
    tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    given: dict[str, Any] = {"loss_inputs": tokens, "target": "cuda:a100", "optimizer": torch.optim.AdamW}
    given["variant"] = {"output": "kept" if kept else "dropped"}
    if source == LITGPT:
        return fp.eager_memory(model_of(row), tokens, loss=published_litgpt.loss_in_pieces, **given)
    if source == MEGATRON:
        given["optimizer"] = lambda parameters: published_megatron.DistributedOptimizer(parameters, ranks)
        return fp.eager_memory(model_of(row), tokens, loss=published_megatron.loss, accumulate=2, **given)
    shard = {"ranks": ranks, "shard": ["model.layers.*"]} if ranks > 1 else {"accumulate": 2}
    return fp.eager_memory(
        model_of(row),
        kwargs={"input_ids": tokens, "use_cache": False},
        loss=_wide,
        precision="bf16",
        **shard,
        **given,
    )


def _wide(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Of logits in float32."""
    return F.cross_entropy(output.logits.flatten(0, -2).float(), target.flatten())


def main() -> None:
    """The table."""
    warnings.filterwarnings("ignore")
    lines = [
        "| source | model, cards, batch × sequence | recomputed | published | allocated | reserved | off |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        eager = counted(row.model, row.source, row.ranks, row.batch, row.sequence, row.how, row.kept)
        found = {
            "allocated": max(each.most_allocated for each in eager.replayed) / row.unit,
            "reserved": max(each.reserved for each in eager.replayed) / row.unit,
        }
        off = f"{found[row.counts] / row.published - 1:+.1%}".replace("-", "−").replace("%", " %")
        how, _, lora = row.how.partition("LoRA")
        how = how.rstrip(", ") or "nothing"
        model = f"{row.model}, LoRA{lora}" if lora else row.model
        shape = f"{row.ranks}, {row.batch} × {row.sequence:,}{' *' if row.source in UNSAID else ''}"
        name = "GB" if row.unit == GB else "GiB"
        lines.append(
            f"| {row.source} | {model}, {shape} | {how} | {row.published:.2f} {name} {row.counts} | "
            f"{found['allocated']:.2f} | {found['reserved']:.2f} | {off} |"
        )
        print(lines[-1], flush=True)
    text, table = PAGE.read_text(), MARKS.format("\n".join(lines) + "\n")
    PAGE.write_text(re.sub(MARKS.format(".*?"), lambda _: table, text, flags=re.S))


if __name__ == "__main__":
    main()
