"""Configurations of transformers made small: of every kind of model that the library lists, a few narrow layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

# What a configuration calls its sizes → what they become.
_SIZES: tuple[tuple[float, str], ...] = (
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers num_blocks num_key_value_heads num_experts_per_tok "
        "moe_topk moe_k type_vocab_size linear_num_key_heads num_codebooks eos_token_id "
        "num_global_key_value_heads",
    ),
    (
        1,
        "encoder_layers decoder_layers num_decoder_layers num_encoder_layers n_group topk_group "
        "n_shared_experts first_k_dense_replace mamba_n_groups n_groups bos_token_id decoder_start_token_id "
        "num_random_blocks",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "num_experts num_local_experts n_routed_experts moe_num_experts rotary_dim state_size ssm_state_size "
        "mamba_d_state conv_kernel mamba_chunk_size chunk_size time_step_rank sliding_window attention_window "
        "window_size num_conv_pos_embeddings mm_tokens_per_image linear_num_value_heads block_size",
    ),
    (
        8,
        "head_dim d_kv attention_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim patch_size "
        "mamba_n_heads mamba_d_head mamba_num_heads mamba_head_dim linear_key_head_dim linear_value_head_dim "
        "global_head_dim",
    ),
    (
        16,
        "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank projection_dim "
        "num_mel_bins embedding_size bottleneck_dim bottleneck_size intra_bottleneck_size "
        "max_relative_positions",
    ),
    (
        32,
        "hidden_size d_model n_embd dim embed_dim hidden_dim decoder_hidden_size encoder_hidden_size "
        "model_dim emb_dim embedding_dim word_embed_proj_dim image_size max_source_positions "
        "max_target_positions lstm_hidden_size",
    ),
    (48, "intermediate_size ffn_dim d_ff d_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size"),
    (64, "max_position_embeddings n_positions n_ctx"),
    (99, "vocab_size vocab_size_per_layer_input"),
    (3, "num_labels"),
    (0, "pad_token_id num_kv_shared_layers"),
    (0.0, "layerdrop encoder_layerdrop decoder_layerdrop mask_time_prob"),
    (False, "use_cache apply_spec_augment"),
)
SMALL = {name: size for size, names in _SIZES for name in names.split()}
MOST_PARAMETERS = 30_000_000
_HEADS = (
    *("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_IMAGE_CLASSIFICATION"),
    *("MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_CTC", "MODEL_FOR_AUDIO_CLASSIFICATION", "MODEL_FOR_DEPTH_ESTIMATION"),
    *("MODEL_FOR_SEMANTIC_SEGMENTATION", "MODEL_FOR_OBJECT_DETECTION", "MODEL_FOR_VIDEO_CLASSIFICATION", "MODEL"),
)


def small(kind: type, inner: bool = False) -> dict[str, Any]:
    """Arguments of a class of configurations; those within it are made small, too."""
    known: set[str] = set()
    for each in kind.__mro__:
        known |= set(getattr(each, "__annotations__", ()))
        if "__init__" in vars(each):
            known |= set(inspect.signature(each.__init__).parameters)
    usual, other_names = kind(), getattr(kind, "attribute_map", None) or {}
    given: dict[str, Any] = {}
    for name in known - set(other_names):
        before = getattr(usual, name, None)
        if isinstance(before, float) and "drop" in name:
            given[name] = 0.0
        elif name in SMALL and before is not None and not isinstance(before, list | tuple):
            if isinstance(before, bool) == isinstance(SMALL[name], bool):
                given[name] = SMALL[name]
        elif name.endswith(("layer_types", "layers_block_type")) and isinstance(before, list) and before:
            given[name] = (list(dict.fromkeys(before)) * 2)[:2]
    if getattr(usual, "num_key_value_heads", None) == getattr(usual, "num_attention_heads", 0):
        given["num_key_value_heads"] = given.get("num_attention_heads", 4)
    for name in getattr(kind, "sub_configs", None) or {}:
        if getattr(usual, name, None) is not None:
            given[name] = small(type(getattr(usual, name)), True)
    return given | ({"model_type": kind.model_type} if inner else {})  # type: ignore[attr-defined]


def check_size(module: torch.nn.Module) -> None:
    """Refuse a module that is too large to be judged quickly.

    Raises:
        ValueError: it is.
    """
    count = sum(p.numel() for p in module.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters")


def classes(model_type: str) -> Iterator[type[torch.nn.Module]]:
    """The models of one type, those with a head first."""
    for head in _HEADS:
        named = getattr(modeling_auto, f"{head}_MAPPING_NAMES").get(model_type, ())
        for name in [named] if isinstance(named, str) else named:
            if hasattr(transformers, name):
                yield getattr(transformers, name)


def inputs(module: Any, config: Any) -> dict[str, torch.Tensor]:
    """What a model is called with."""
    takes, main = inspect.signature(module.forward).parameters, module.main_input_name
    text, vision = (getattr(config, f"{part}_config", None) or config for part in ("text", "vision"))
    words = min(getattr(text, "vocab_size", None) or 60, 90)
    found = {name: torch.randint(3, words, (2, 8)) for name in ("input_ids", "decoder_input_ids") if name in takes}
    if "pixel_values" in takes and (main == "pixel_values" or "CLIP" in type(module).__name__):
        size = getattr(vision, "image_size", 32)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        found["pixel_values"] = torch.randn(8, getattr(vision, "num_channels", 3) or 3, height, width)
    if "input_ids" not in takes and "input_values" in takes:
        found["input_values"] = torch.randn(2, 800)
    if "input_ids" not in takes and "input_features" in takes:
        bands = getattr(config, "num_mel_bins", None) or 16
        steps = 2 * getattr(config, "max_source_positions", 32)
        found["input_features"] = (
            torch.randn(2, bands, steps) if main == "input_features" else torch.randn(2, 40, bands)
        )
    return found
