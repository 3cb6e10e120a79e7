"""Graph → graph: the passes between a model and the whole training step."""

from foreplan.passes.accumulate import accumulate
from foreplan.passes.autodiff import Differentiate, differentiate, updating
from foreplan.passes.base import KNOWN, Pass
from foreplan.passes.choose_trained import ChooseTrained
from foreplan.passes.chunk_loss import chunk_losses
from foreplan.passes.fold_transposes import fold_transposes
from foreplan.passes.fuse_attention import FuseAttention, fuse_attention
from foreplan.passes.master_weights import master_weights
from foreplan.passes.micro_batches import Accumulation, with_same_stored
from foreplan.passes.pack_attention import pack_attention
from foreplan.passes.pack_masks import pack_masks
from foreplan.passes.pipeline import (
    Entry,
    Ran,
    Stage,
    before,
    check_names,
    run_passes,
    simplified,
    target_passes,
    without,
)
from foreplan.passes.precision import PRECISIONS, narrow_type
from foreplan.passes.push_slices import push_slices
from foreplan.passes.quantised_weights import quantised_weights
from foreplan.passes.resized import resized
from foreplan.passes.select import SelectOutputs
from foreplan.passes.simplify import fold_constants, fuse_maps, share_common
from foreplan.passes.tile.channels import split_channels, split_pieces
from foreplan.passes.tile.concats import split_concats
from foreplan.passes.training import of_mode, training_form
from foreplan.passes.wide_gradients import wide_gradients, wide_maps

__all__ = [
    "KNOWN",
    "PRECISIONS",
    "Accumulation",
    "ChooseTrained",
    "Differentiate",
    "Entry",
    "FuseAttention",
    "Pass",
    "Ran",
    "SelectOutputs",
    "Stage",
    "accumulate",
    "before",
    "check_names",
    "chunk_losses",
    "differentiate",
    "fold_constants",
    "fold_transposes",
    "fuse_attention",
    "fuse_maps",
    "master_weights",
    "narrow_type",
    "of_mode",
    "pack_attention",
    "pack_masks",
    "push_slices",
    "quantised_weights",
    "resized",
    "run_passes",
    "share_common",
    "simplified",
    "split_channels",
    "split_concats",
    "split_pieces",
    "target_passes",
    "training_form",
    "updating",
    "wide_gradients",
    "wide_maps",
    "with_same_stored",
    "without",
]
