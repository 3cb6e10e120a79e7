"""Graph → graph: the passes between a model and the whole training step."""

from foreplan.passes.accumulate import accumulate
from foreplan.passes.autodiff import differentiate, updating
from foreplan.passes.choose_trained import choose_trained
from foreplan.passes.chunk_loss import chunk_losses
from foreplan.passes.fold_transposes import fold_transposes
from foreplan.passes.fuse_attention import fuse_attention
from foreplan.passes.fuse_conv_maps import fuse_conv_maps
from foreplan.passes.fuse_matmul_maps import fuse_matmul_maps
from foreplan.passes.fuse_norm_masks import fuse_norm_masks
from foreplan.passes.group_updates import group_updates
from foreplan.passes.master_weights import master_weights
from foreplan.passes.micro_batches import Accumulation, with_same_stored
from foreplan.passes.pack_attention import pack_attention
from foreplan.passes.pack_masks import pack_masks
from foreplan.passes.pipeline import (
    NAMES,
    PASSES,
    Pass,
    Ran,
    Stage,
    check_names,
    list_without,
    run_passes,
    simplified,
    training_forms,
)
from foreplan.passes.precision import PRECISIONS, narrow_type, with_precision
from foreplan.passes.push_slices import push_slices
from foreplan.passes.quantised_weights import quantised_weights
from foreplan.passes.resized import resized
from foreplan.passes.select import select_outputs
from foreplan.passes.settings import Fission, Settings
from foreplan.passes.simplify import fold_constants, fuse_maps, share_common
from foreplan.passes.split_channels import split_channels, split_pieces
from foreplan.passes.split_concats import split_concats
from foreplan.passes.training import of_mode, training_form
from foreplan.passes.wide_gradients import wide_gradients, wide_maps

__all__ = [
    "NAMES",
    "PASSES",
    "PRECISIONS",
    "Accumulation",
    "Fission",
    "Pass",
    "Ran",
    "Settings",
    "Stage",
    "accumulate",
    "check_names",
    "choose_trained",
    "chunk_losses",
    "differentiate",
    "fold_constants",
    "fold_transposes",
    "fuse_attention",
    "fuse_conv_maps",
    "fuse_maps",
    "fuse_matmul_maps",
    "fuse_norm_masks",
    "group_updates",
    "of_mode",
    "push_slices",
    "list_without",
    "master_weights",
    "quantised_weights",
    "narrow_type",
    "pack_attention",
    "pack_masks",
    "resized",
    "run_passes",
    "select_outputs",
    "share_common",
    "simplified",
    "split_channels",
    "split_pieces",
    "split_concats",
    "training_form",
    "training_forms",
    "updating",
    "wide_gradients",
    "wide_maps",
    "with_precision",
    "with_same_stored",
]
