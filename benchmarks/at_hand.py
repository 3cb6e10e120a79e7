"""What `fp.eager_memory` counts for 60 networks of others, beside real CPU tensors that the same mode follows.

    python -m benchmarks.at_hand [NAME...]

Networks of torchvision, timm and transformers, in their own widths or in small configurations, in four training loops:
AdamW in float32; the same within bf16 autocast; three micro-batches; and with checkpoints, where the library has a
switch for them, or else with SGD, Nesterov momentum, all parameters at once, and gradients that are kept. A mode that
looks on has gradients summed in new tensors, in both. Figures are the most bytes of live tensors in the second step.
Writes `results/at-hand.md` if no network is named.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import tests.torch.conftest  # noqa: F401
from foreplan.eager import Variant
from foreplan.eager.watched import loop as at_hand
from foreplan.eager.watched.loop import Recipe, run

MIB = 2**20
RESULT = Path(__file__).resolve().parent / "results" / "at-hand.md"
IMAGES = (
    "squeezenet1_0 squeezenet1_1 shufflenet_v2_x0_5 shufflenet_v2_x1_0 mnasnet0_5 mnasnet0_75 mobilenet_v2 "
    "mobilenet_v3_small mobilenet_v3_large resnet18 resnet34 regnet_y_400mf regnet_x_400mf regnet_y_800mf "
    "efficientnet_b0 efficientnet_b1 densenet121 googlenet resnet50 swin_t"
)
TIMM = (
    "test_vit test_resnet test_convnext test_efficientnet test_byobnet test_nfnet resnet10t seresnet18 convnext_atto "
    "vit_tiny_patch16_224 deit_tiny_patch16_224 levit_128s coat_lite_tiny pit_ti_224 xcit_nano_12_p16_224 regnetx_002 "
    "ghostnet_100 mobilevit_xxs edgenext_xx_small fastvit_t8"
)
LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 128, "n_layer": 4, "n_head": 4}),
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "bert": ("BertForMaskedLM", {}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 512, "word_embed_proj_dim": 128}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 32}),
    "mistral": ("MistralForCausalLM", {"num_key_value_heads": 2}),
    "gemma": ("GemmaForCausalLM", {"num_key_value_heads": 2, "head_dim": 32}),
    "phi": ("PhiForCausalLM", {}),
    "bloom": ("BloomForCausalLM", {"n_head": 4, "n_layer": 4}),
    "falcon": ("FalconForCausalLM", {}),
    "roberta": ("RobertaForMaskedLM", {}),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 128, "hidden_dim": 512, "n_layers": 4, "n_heads": 4}),
    "albert": ("AlbertForMaskedLM", {"embedding_size": 64}),
    "electra": ("ElectraForMaskedLM", {"embedding_size": 64}),
    "deberta-v2": ("DebertaV2ForMaskedLM", {}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 4, "num_heads": 4}),
    "bart": ("BartForConditionalGeneration", {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2,
             "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4}),
    "mamba": ("MambaForCausalLM", {}),
}  # fmt: skip
SIZES = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
Made = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], Callable[[torch.nn.Module], Any] | None]


def image(library: str, name: str) -> Made:
    """A network of images, and the switch of its library for checkpoints."""
    if library == "torchvision":
        import torchvision

        size = {"inception_v3": 96, "vit_b_16": 224, "maxvit_t": 224}.get(name, 64)
        more = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        model, switch = torchvision.models.get_model(name, num_classes=10, **more), None
    else:
        import timm

        model = timm.create_model(name, num_classes=10)
        size = model.default_cfg["input_size"][-1] if any(x in name for x in ("224", "levit", "coat")) else 64
        switch = lambda module: module.set_grad_checkpointing(True)  # noqa: E731
    return model, (torch.randn(2, 3, size, size),), {}, switch


def language(name: str) -> Made:
    """A network of tokens, and the switch for checkpoints."""
    import transformers

    kind, more = LANGUAGE[name]
    config = transformers.AutoConfig.for_model(name, **SIZES | {"decoder_start_token_id": 0} | more)
    model = getattr(transformers, kind)(config)
    tokens = torch.randint(3, 1000, (4, 64))
    given = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    switch = partial(_checkpointed, kwargs={"use_reentrant": False})
    return model, (), given, switch


def _checkpointed(module: Any, kwargs: dict[str, Any]) -> None:
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def networks() -> Iterator[tuple[str, str, Callable[[], Made]]]:
    """Library, name, and what makes it."""
    for name in LANGUAGE:
        yield "transformers", name, partial(language, name)
    for name in IMAGES.split():
        yield "torchvision", name, partial(image, "torchvision", name)
    for name in TIMM.split():
        yield "timm", name, partial(image, "timm", name)


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, with the further heads that some networks have while they train."""
    heads = [each for each in output if isinstance(each, torch.Tensor)] if isinstance(output, tuple) else [output]
    return sum(F.cross_entropy(each, target) for each in heads)  # type: ignore[return-value]


def loops(made: Made) -> Iterator[tuple[str, torch.nn.Module, Recipe]]:
    """The training loops."""
    module, example, kwargs, switch = made
    loss, inputs = (None, None) if kwargs else (loss_of, (torch.zeros(2, dtype=torch.int64),))
    start = partial(Recipe, example, kwargs, loss, inputs, torch.optim.AdamW, workspaces=None, real=False)
    yield "AdamW", module, start("float32", 1, Variant())
    yield "bf16", module, start("bf16", 1, Variant())
    yield "3 micro-batches", module, start("float32", 3, Variant())
    if switch is not None:
        try:
            again = copy.deepcopy(module).train()
            switch(again)
            yield "checkpoints", again, start("float32", 1, Variant())
            return
        except (AssertionError, ValueError, NotImplementedError):
            pass
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    variant = Variant(zero="keep", optimizer="foreach")
    yield "momentum", module, Recipe(example, kwargs, loss, inputs, momentum, "float32", 1, variant, None, False)


def measured(library: str, name: str, make: Callable[[], Made]) -> Iterator[list[Any]]:
    """A row a loop: counted, measured, off, off beside what lasts, and the seconds of both."""
    from dataclasses import replace

    torch.manual_seed(0)
    for loop, module, recipe in loops(make()):
        begin = time.perf_counter()
        counted = run(module, recipe, sums_in_place=False)
        between = time.perf_counter()
        found = run(copy.deepcopy(module), replace(recipe, real=True), sums_in_place=False)
        end = time.perf_counter()
        lasts = min(phase.live for phase in found.phases[-3:])
        off = counted.peak / found.peak - 1
        more = (counted.peak - found.peak) / max(1, found.peak - lasts)
        yield [library, name, loop, counted.peak, found.peak, off, more, between - begin, end - between]


def main() -> None:
    """The table."""
    warnings.filterwarnings("ignore")
    asked, rows = set(sys.argv[1:]), []
    at_hand.ITERATIONS = 2  # the third is as the second
    for library, name, make in networks():
        if asked and name not in asked:
            continue
        try:
            for row in measured(library, name, make):
                rows.append(row)
                print(*row[:3], *(f"{x / MIB:.2f}" for x in row[3:5]), *(f"{x:+.3%}" for x in row[5:7]),
                      *(f"{x:.1f}" for x in row[7:]), flush=True)  # fmt: skip
        except Exception as error:
            print(library, name, "failed:", type(error).__name__, str(error)[:300], flush=True)
            rows.append([library, name, type(error).__name__])
        if not asked:
            RESULT.write_text(table(rows))


def table(rows: list[list[Any]]) -> str:
    """The page of the results."""
    good = [row for row in rows if len(row) > 3]
    off = sorted(abs(row[5]) for row in good)
    within = [sum(x <= limit for x in off) for limit in (0, 0.01, 0.03)]
    seconds = sorted(row[7] for row in good)
    failed = ", ".join(f"{row[1]} ({row[2]})" for row in rows if len(row) <= 3) or "none"
    head = [
        f"PyTorch {torch.__version__}, CPU, one thread; `python -m benchmarks.at_hand`. Counted: `fp.eager_memory`, on "
        "tensors without bytes. Measured: the same loop on real tensors. Both are followed by the same mode.",
        "",
        f"{len(good)} pairs of network and loop: {within[0]} to the byte, {within[1]} within 1 %, {within[2]} within "
        f"3 %; at most {off[-1]:.2%} off. Seconds to count two steps: median {seconds[len(seconds) // 2]:.1f}, at most "
        f"{seconds[-1]:.1f}. Failed: {failed}.",
        "",
        "| library | network | loop | counted, MiB | measured, MiB | off | of what comes and goes |",
        "|---|---|---|---|---|---|---|",
    ]
    lines = [
        f"| {row[0]} | `{row[1]}` | {row[2]} | {row[3] / MIB:,.2f} | {row[4] / MIB:,.2f} | {_percent(row[5])} | "
        f"{_percent(row[6])} |"
        for row in good
    ]
    return "\n".join([*head, *lines]) + "\n"


def _percent(share: float) -> str:
    return "0" if not share else f"{share:+.2%}".replace("-", "−")


if __name__ == "__main__":
    main()
