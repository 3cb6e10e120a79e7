"""Normalisation: every form under one name. Statistics over a batch's channels, or over the rows of a tensor."""

from foreplan.ops.norm.batch import (
    BatchNorm,
    BatchNormGrad,
    BatchNormTrain,
    ChannelMoments,
    batch_norm,
)
from foreplan.ops.norm.masked import MaskedBatchNormGrad
from foreplan.ops.norm.rows import (
    LayerNorm,
    LayerNormGrad,
    RMSNorm,
    RMSNormGrad,
    group_norm,
    instance_norm,
    layer_norm,
    rms_norm,
)

__all__ = [
    "BatchNorm",
    "BatchNormGrad",
    "BatchNormTrain",
    "ChannelMoments",
    "LayerNorm",
    "LayerNormGrad",
    "MaskedBatchNormGrad",
    "RMSNorm",
    "RMSNormGrad",
    "batch_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "rms_norm",
]
