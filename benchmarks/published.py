"""Estimates held against what others have published, and what users have asked: the memory of one rank.

    python benchmarks/published.py            # plans every row, and writes the tables
    python benchmarks/published.py -k litgpt  # plans some rows again

Writes published.json beside this file, and tables into docs/published-memory.md. No card is needed: plans are made for
cards that are not here. Nothing of PyTorch runs: the figures of others are quoted as they stand at the source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from pages import put

import foreplan as fp
from foreplan.base.units import format_bytes, format_seconds
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph
from foreplan.models.llama import EPSILON, INIT, block, frequencies

FILE = Path(__file__).resolve().with_suffix(".json")
PAGE = "docs/published-memory.md"
GB, GIB = 10**9, 2**30

SHAPES = {
    "Llama 2 7B": "layers=32,width=4096,heads=32,kv_heads=32,features=11008,vocabulary=32000,tied=False,stretch=1",
    "Llama 2 13B": "layers=40,width=5120,heads=40,kv_heads=40,features=13824,vocabulary=32000,tied=False,stretch=1",
    "Llama 2 70B": "layers=80,width=8192,heads=64,kv_heads=8,features=28672,vocabulary=32000,tied=False,stretch=1",
    "Llama 3.1 8B": "layers=32,width=4096,heads=32,kv_heads=8,features=14336,vocabulary=128256,tied=False,stretch=8",
    "Llama 3.1 70B": "layers=80,width=8192,heads=64,kv_heads=8,features=28672,vocabulary=128256,tied=False,stretch=8",
}
ISSUES, BLOBS = "https://github.com/{}/issues/{}", "https://github.com/{}/blob/main/{}"
TITAN = "[torchtitan](" + BLOBS.format("pytorch/torchtitan", "benchmarks/llama3_h100_202412_torchtitan.md") + ")"
LITGPT = "[litgpt](" + BLOBS.format("Lightning-AI/litgpt", "tutorials/resource-tables.md") + ")"
TUNE = "[torchtune](" + BLOBS.format("meta-pytorch/torchtune", "README.md") + ")"
A100_LINKS, H100_LINKS = "nvlink3*8+infiniband-hdr", "nvlink4*8+infiniband-ndr"
SLOW = ("Llama 2 70B", "Llama 3.1 70B")  # a budget is not searched for where recomputing alike meets it
LAYERS = "model.layers.*"
# Of each layer, torchtitan keeps attention and every second product: the first, third, fifth and seventh.
SELECTIVE = {
    "recompute": [LAYERS],
    "keep": [f"{LAYERS}.{name}" for name in ("self_attn.q_proj", "self_attn.v_proj", "self_attn/attention")]
    + [f"{LAYERS}.{name}" for name in ("mlp.gate_proj", "mlp.down_proj")],
}
WHOLE = {"checkpoint": [LAYERS]}
ADAPTED = (f"{LAYERS}.self_attn.q_proj", f"{LAYERS}.self_attn.v_proj")


@dataclass(frozen=True)
class Row:
    """A published figure, and the step that it is of.

    Attributes:
        key: of the row, in the file.
        model: one of `SHAPES`.
        card: a target without its choices, such as `a100`.
        ranks: cards; `links` join them.
        batch, seq: of one rank.
        figure: what was published, for people.
        counted: what it counts.
        nbytes: the same in bytes, for the arena; 0: there is none.
        source: a link.
        assumed: what the source does not say, so that it was assumed.
        shard: what ranks hold parts of; several ranks alone.
        alike: options that recompute what the source recomputes, and their name.
        narrow: whether all weights are kept in bfloat16.
        lora: the rank of adapters; 0: all weights are trained.
    """

    key: str
    model: str
    card: str
    ranks: int
    batch: int
    seq: int
    figure: str
    counted: str
    nbytes: int
    source: str
    assumed: str = ""
    shard: str = "parameters"
    alike: tuple[str, dict[str, Any]] = ("", {})
    narrow: bool = False
    lora: int = 0
    links: str = field(default="")


def cookbook(number: int) -> str:
    """A link to an issue."""
    return f"[llama-cookbook #{number}]({ISSUES.format('meta-llama/llama-cookbook', number)})"


FULL, SOME, NOTHING = ("all layers", WHOLE), ("selective", SELECTIVE), ("nothing", {})
ROWS = [
    Row("titan-8", "Llama 3.1 8B", "h100", 8, 2, 8192, "82.4 GiB, compiled 77.0", "reserved", int(82.4 * GIB), TITAN,
        "sequence 8,192, its default", alike=SOME),
    Row("titan-128", "Llama 3.1 8B", "h100", 128, 2, 8192, "67.0 GiB, compiled 62.0", "reserved", int(67 * GIB), TITAN,
        "sequence 8,192, its default", alike=SOME),
    Row("titan-32k", "Llama 3.1 8B", "h100", 8, 1, 32768, "83.9 GiB, compiled, float8", "reserved", int(83.9 * GIB),
        TITAN, alike=FULL),
    Row("cookbook-100", "Llama 2 7B", "a100-40gb", 4, 4, 2048, "29 GB; 27 GB with flash attention", "reserved",
        27 * GB, cookbook(100), "4 × 2,048, all layers recomputed", alike=FULL),
    Row("cookbook-25", "Llama 2 13B", "a100", 8, 4, 2048, "48 GB", "reserved", 48 * GB, cookbook(25),
        "sequence 2,048, all layers recomputed", alike=FULL),
    Row("cookbook-120", "Llama 2 70B", "a100", 16, 1, 2048, "42 GB (59 active, 63 reserved)", "allocated", 42 * GB,
        cookbook(120), "1 × 2,048, all layers recomputed", alike=FULL, narrow=True),
    Row("blog-70b", "Llama 2 70B", "a100", 16, 1, 2048, "fits 80 GB", "no figure", 80 * GIB,
        "[Hugging Face](" + BLOBS.format("huggingface/blog", "ram-efficient-pytorch-fsdp.md") + ")", alike=FULL),
    Row("litgpt-7b-1", "Llama 2 7B", "a100-40gb", 1, 1, 1304, "21.30 GB", "max GPU RAM", int(21.3 * GB), LITGPT,
        alike=NOTHING, narrow=True, lora=8),
    Row("litgpt-7b-2", "Llama 2 7B", "a100-40gb", 1, 2, 1304, "29.07 GB", "max GPU RAM", int(29.07 * GB), LITGPT,
        alike=NOTHING, narrow=True, lora=8),
    Row("litgpt-13b-1", "Llama 2 13B", "a100-40gb", 1, 1, 1304, "38.12 GB", "max GPU RAM", int(38.12 * GB), LITGPT,
        alike=NOTHING, narrow=True, lora=8),
    Row("litgpt-7b-fsdp", "Llama 2 7B", "a100-40gb", 2, 1, 1304, "22.18 GB", "max GPU RAM", int(22.18 * GB), LITGPT,
        alike=FULL, narrow=True, lora=8),
    Row("litgpt-13b-fsdp", "Llama 2 13B", "a100-40gb", 4, 1, 1304, "35.57 GB", "max GPU RAM", int(35.57 * GB), LITGPT,
        alike=FULL, narrow=True, lora=8),
    Row("tune-70b", "Llama 3.1 70B", "a100", 8, 2, 2048, "27.6 GiB, compiled", "peak memory", int(27.6 * GIB), TUNE,
        "adapters of rank 16 on queries and values", alike=FULL, narrow=True, lora=16),
    Row("megatron-597", "Llama 2 7B", "a100", 8, 2, 4096, "asks for it", "", 0,
        f"[Megatron-LM #597]({ISSUES.format('NVIDIA/Megatron-LM', 597)})", shard="state"),
]  # fmt: skip


def model_of(row: Row) -> Graph:
    """The model, with adapters where they are trained."""
    sizes = {name: json.loads(text.lower()) for name, _, text in (one.partition("=") for one in shape(row).split(","))}
    graph = narrow_llama(**sizes) if row.narrow else fp.models.build("llama", **sizes)
    return fp.lora(graph, rank=row.lora, alpha=16, targets=ADAPTED) if row.lora else graph


def shape(row: Row) -> str:
    """The sizes of a row's model."""
    return f"{SHAPES[row.model]},batch={row.batch},seq={row.seq}"


def narrow_llama(
    batch: int, seq: int, layers: int, width: int, heads: int, kv_heads: int, features: int, vocabulary: int,
    tied: bool, stretch: float,
) -> Graph:  # fmt: skip
    """The zoo's Llama with all weights in bfloat16, as files of Llama have them."""
    assert not tied
    turns = frequencies(width // heads, 500000.0, stretch)

    def model(tokens: Tensor) -> dict[str, Tensor]:
        with nn.scope("model"):
            x = nn.embedding(tokens, vocabulary, width, name="embed_tokens", weight_init=INIT, dtype="bfloat16")
            for i in range(layers):
                with nn.scope("layers"), nn.scope(i):
                    x = block(x, heads, kv_heads, features, turns)
            x = nn.rms_norm(x, epsilon=EPSILON, name="norm")
        return {"logits": nn.linear(x, vocabulary, bias=False, name="lm_head", weight_init=INIT)}

    return trace(model, spec((batch, seq), "int64"), name="llama")


def compiled(row: Row, **options: Any) -> fp.Compiled:
    """The step of a row."""
    together = {"ranks": row.ranks, "shard": row.shard, "links": row.links or links(row)} if row.ranks > 1 else {}
    return fp.compile(
        model_of(row),
        loss=fp.losses.cross_entropy,
        optimizer=fp.optim.AdamW(1e-4),
        target=f"cuda:{row.card},nondeterministic",
        precision="bf16",
        narrow_weights=row.narrow and not row.lora,
        **together,
        **options,
    )


def links(row: Row) -> str:
    """What joins the cards: NVLink within a node of 8, InfiniBand between nodes."""
    found = H100_LINKS if row.card == "h100" else A100_LINKS
    return found if row.ranks > 8 else found.partition("*")[0] + f"*{row.ranks}"


def told(step: fp.Compiled) -> dict[str, Any]:
    """The figures that are kept."""
    figures = step.estimate()
    names = ("arena_bytes", "peak_bytes", "persistent_bytes", "categories", "predicted_seconds", "extra_seconds_ratio")
    return {name: figures[name] for name in names} | {"numbers": figures["weights"]["trained"]["numbers"]}


def found(row: Row) -> dict[str, Any]:
    """A row's plans: without a budget, recomputing what the source does, and within the published figure."""
    plain = told(compiled(row))
    result = {"plain": plain}
    _, options = row.alike
    if options:
        result["alike"] = told(compiled(row, **options))
    if not row.nbytes or plain["arena_bytes"] <= row.nbytes:
        return result
    if row.model in SLOW and result["alike"]["arena_bytes"] <= row.nbytes:
        return result | {"within": result["alike"]}
    outside = plain["peak_bytes"] - plain["arena_bytes"]  # which a budget of a card counts, and sources do not
    try:
        result["within"] = told(compiled(row, budget=row.nbytes + outside, fission="off"))
    except fp.DoesNotFitError as error:
        result["needed"] = error.needed - outside
    return result


def lines(rows: dict[str, Any]) -> Iterator[str]:
    """A row a figure."""
    yield (
        "| model | cards, batch × sequence | published | what it counts | source | foreplan, without a budget "
        "| parameters and state | activations | recomputing alike | within the published figure |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in ROWS:
        if row.key in rows:
            yield f"| {' | '.join(cells(row, rows[row.key]))} |"


def cells(row: Row, figures: dict[str, Any]) -> list[str]:
    """The columns of a row."""
    plain, name = figures["plain"], row.alike[0]
    how = f"LoRA {row.lora}" if row.lora else "bfloat16" if row.narrow else ""
    same = f"{memory(figures['alike'])} ({name})" if "alike" in figures else f"the same ({name})" if name else ""
    within = ""
    if "within" in figures:
        factor = figures["within"]["predicted_seconds"] / plain["predicted_seconds"]
        alike = " so" if figures["within"] == figures.get("alike") else ""
        within = f"fits{alike}, {factor:.2f} × the time"
    elif "needed" in figures:
        within = f"no: {format_bytes(figures['needed'])} at least"
    elif row.nbytes:
        within = "fits as it is"
    mark = " *" if row.assumed else ""
    return [
        f"{row.model}{', ' * bool(how)}{how}", f"{row.ranks} × {row.card}, {row.batch} × {row.seq:,}{mark}",
        row.figure, row.counted, row.source, memory(plain), format_bytes(kept(plain)),
        format_bytes(plain["categories"]["activations"]), same, within,
    ]  # fmt: skip


DEEPSPEED = (18, 6_805_000_000, 131_000_000, 4)  # bytes a parameter, parameters, those of the largest layer, cards


def deepspeed() -> float:
    """Bytes a card that DeepSpeed's estimator says for stage 3: all in parts, and the largest layer in float32."""
    each, parameters, largest, cards = DEEPSPEED
    return each * parameters / cards + 4 * largest


def megatron(row: Row, numbers: int) -> tuple[float, float]:
    """Bytes of weights and state, and of activations, as Megatron-LM's `report_theoretical_memory` counts them without
    parallelism of tensors or layers: the distributed optimizer's 6 + 12 / d bytes a parameter; and its formula for
    selective recomputation (Korthikanti et al. 2022, arXiv:2205.05198, table 2).
    """
    sizes = {name: text for name, _, text in (one.partition("=") for one in shape(row).split(","))}
    width, features, vocabulary, layers = (int(sizes[name]) for name in ("width", "features", "vocabulary", "layers"))
    tokens = row.batch * row.seq
    inner = layers * tokens * width * (18 + 4 * features / width)
    ends = 8 * tokens + tokens * width + 4 * tokens * (width + vocabulary)
    return numbers * (6 + 12 / row.ranks), inner + ends


def counted(rows: dict[str, Any]) -> Iterator[str]:
    """A row a formula."""
    yield "| who counts | model, cards | bytes a parameter and card | on a card | foreplan keeps | that is |"
    yield "|---|---|---|---|---|---|"
    asked = next(row for row in ROWS if row.key == "megatron-597")
    plain = rows[asked.key]["plain"]
    numbers = plain["numbers"]
    states, activations = megatron(asked, numbers)
    link = f"[DeepSpeed #4527]({ISSUES.format('deepspeedai/DeepSpeed', 4527)})"
    _, parameters, _, cards = DEEPSPEED
    yield (
        f"| {link}, stage 3 | 6,805 M, {cards} | 18 / {cards}, and the largest layer "
        f"| {format_bytes(round(deepspeed()))} | 12 / {cards} | {format_bytes(12 * parameters // cards)} |"
    )
    yield (
        f"| {asked.source}, distributed optimizer | {asked.model}, {asked.ranks} | 6 + 12 / {asked.ranks} "
        f"| {format_bytes(round(states))} | 4 + 8 / {asked.ranks} | {format_bytes(kept(plain))} |"
    )
    yield (
        f"| the same, activations of {asked.batch} × {asked.seq:,}, selective | | | {format_bytes(round(activations))} "
        f"| without a budget | {format_bytes(plain['categories']['activations'])} |"
    )


def kept(figures: dict[str, Any]) -> int:
    """Bytes from step to step: parameters and the optimizer's state."""
    found: int = figures["categories"]["parameters"] + figures["categories"]["optimizer_state"]
    return found


def memory(figures: dict[str, Any]) -> str:
    """The arena, and the whole card with what lies outside it."""
    return f"{format_bytes(figures['arena_bytes'])}, card {format_bytes(figures['peak_bytes'])}"


@click.command()
@click.option("-k", "words", default="", help="Rows with this in their keys alone.")
@click.option("--tables", is_flag=True, help="Plan nothing, and write the tables again.")
def main(words: str, tables: bool) -> None:
    """Hold estimates against published figures."""
    rows: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for row in () if tables else ROWS:
        if words in row.key:
            rows[row.key] = found(row)
            plain = rows[row.key]["plain"]
            click.echo(f"{row.key}: {memory(plain)}, {format_seconds(plain['predicted_seconds'])}", err=True)
            FILE.write_text(json.dumps(rows, indent=1) + "\n")
    put(PAGE, "figures", "\n".join(lines(rows)))
    if "megatron-597" in rows:
        put(PAGE, "counted", "\n".join(counted(rows)))


if __name__ == "__main__":
    main()
