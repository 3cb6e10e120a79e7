"""The model zoo: forward graphs of well-known networks, without loss, at any sizes."""

from foreplan.models.bert import bert_base
from foreplan.models.chain import conv_chain
from foreplan.models.convnext import convnext_tiny
from foreplan.models.diffusion import ddpm_unet
from foreplan.models.dlrm import dlrm
from foreplan.models.efficientnet import efficientnet_b0
from foreplan.models.gpt2 import gpt2_small
from foreplan.models.llama import llama
from foreplan.models.lstm import lstm_lm
from foreplan.models.mixer import mixer_b16
from foreplan.models.mlp import mlp
from foreplan.models.mobilenet import mobilenet_v2
from foreplan.models.resnet import resnet18, resnet50, resnet101
from foreplan.models.swin import swin_t
from foreplan.models.t5 import t5_small
from foreplan.models.unet import unet
from foreplan.models.vgg import vgg16
from foreplan.models.vit import vit_b16
from foreplan.models.zoo import build, default_loss, describe, names

__all__ = [
    "bert_base",
    "build",
    "conv_chain",
    "convnext_tiny",
    "ddpm_unet",
    "default_loss",
    "describe",
    "dlrm",
    "efficientnet_b0",
    "gpt2_small",
    "llama",
    "lstm_lm",
    "mixer_b16",
    "mlp",
    "mobilenet_v2",
    "names",
    "resnet101",
    "resnet18",
    "resnet50",
    "swin_t",
    "t5_small",
    "unet",
    "vgg16",
    "vit_b16",
]
