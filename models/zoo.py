"""The zoo by name: `resnet50`, `gpt2_small:batch=8,seq=512`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from foreplan.base.arguments import instance
from foreplan.base.errors import UsageError
from foreplan.graph import Graph
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

Size = int | float


@dataclass(frozen=True)
class Model:
    """One entry of the zoo.

    Attributes:
        build: from sizes, all of which have defaults, to the model's graph, without loss.
        loss: name of the loss in `foreplan.losses` that it is trained with.
        text: what it is, in a few words.
    """

    build: Callable[..., Graph]
    loss: str
    text: str

    @property
    def sizes(self) -> dict[str, Size]:
        """The sizes it takes, with their defaults."""
        return {p.name: p.default for p in inspect.signature(self.build).parameters.values()}


MODELS = {
    "conv_chain": Model(conv_chain, "mean", "nine 3×3 convolutions in a row"),
    "mlp": Model(mlp, "cross_entropy", "multi-layer perceptron, 784 inputs, ReLU"),
    "resnet18": Model(resnet18, "cross_entropy", "ResNet-18, images"),
    "resnet50": Model(resnet50, "cross_entropy", "ResNet-50, images"),
    "resnet101": Model(resnet101, "cross_entropy", "ResNet-101, images"),
    "vgg16": Model(vgg16, "cross_entropy", "VGG-16, images"),
    "mobilenet_v2": Model(mobilenet_v2, "cross_entropy", "MobileNetV2, images"),
    "efficientnet_b0": Model(efficientnet_b0, "cross_entropy", "EfficientNet-B0, images"),
    "convnext_tiny": Model(convnext_tiny, "cross_entropy", "ConvNeXt-T, images"),
    "swin_t": Model(swin_t, "cross_entropy", "Swin Transformer T, images"),
    "unet": Model(unet, "cross_entropy", "U-Net, two classes for each pixel"),
    "vit_b16": Model(vit_b16, "cross_entropy", "Vision Transformer B/16, images"),
    "gpt2_small": Model(gpt2_small, "cross_entropy", "GPT-2 small, next token"),
    "bert_base": Model(bert_base, "cross_entropy", "BERT base, masked tokens"),
    "mixer_b16": Model(mixer_b16, "cross_entropy", "MLP-Mixer B/16, images"),
    "ddpm_unet": Model(ddpm_unet, "mse", "diffusion U-Net with attention, the noise in images"),
    "dlrm": Model(dlrm, "binary_cross_entropy", "DLRM, recommendation from numbers and categories"),
    "llama": Model(llama, "cross_entropy", "Llama 3.2 1B, next token"),
    "t5_small": Model(t5_small, "cross_entropy", "T5 small, text to text"),
    "lstm_lm": Model(lstm_lm, "cross_entropy", "LSTM of two layers, next token"),
}


def names() -> tuple[str, ...]:
    """The models there are."""
    return tuple(MODELS)


def build(name: str, **sizes: Size) -> Graph:
    """The graph of a model: `build("resnet50:batch=8,size=64")` or `build("resnet50", batch=8, size=64)`.

    Args:
        name: of the model, with sizes behind a colon if any.
        sizes: win over those in the name.

    Raises:
        UsageError: no such model or size, or a size that is no number; lists the choices.
    """
    base, given = _split(instance("a model's name", name, str, "such as 'resnet50:batch=8,size=64'"))
    model = _look_up(base)
    given |= {key: str(value) for key, value in sizes.items()}
    return model.build(**{key: _number(base, key, text) for key, text in given.items()})


def default_loss(name: str) -> str:
    """Name of the loss a model is trained with; sizes in the name do not matter.

    Raises:
        UsageError: no such model.
    """
    return _look_up(_split(name)[0]).loss


def describe() -> dict[str, str]:
    """What each model is, and the sizes it takes with their defaults."""
    return {
        name: f"{model.text} ({', '.join(f'{key}={value}' for key, value in model.sizes.items())}; loss {model.loss})"
        for name, model in MODELS.items()
    }


def _split(name: str) -> tuple[str, dict[str, str]]:
    base, _, rest = name.partition(":")
    given = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(
                f"{name!r}: {part!r} is not a size; write NAME:key=value,… such as resnet50:batch=8,size=64"
            )
        if key.strip() in given:
            raise UsageError(f"{name!r}: {key.strip()} is given twice")
        given[key.strip()] = value.strip()
    return base, given


def _look_up(name: str) -> Model:
    if name not in MODELS:
        close = difflib.get_close_matches(name.lower(), MODELS, 1, 0.5)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise UsageError(f"there is no model {name!r}{hint} The zoo has {', '.join(MODELS)}.")
    return MODELS[name]


def _number(name: str, key: str, text: str) -> Size:
    sizes = MODELS[name].sizes
    if key not in sizes:
        raise UsageError(f"{name} has no size {key!r}; it has {', '.join(f'{k}={v}' for k, v in sizes.items())}")
    kind = type(sizes[key])
    if kind is bool:
        if text not in ("0", "1", "False", "True"):
            raise UsageError(f"{name}: {key} must be 0 or 1, and is {text!r}")
        return text in ("1", "True")
    try:
        number = kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name}: {key} must be {what}, and is {text!r}") from None
    if number < 0 or (kind is int and number < 1):
        raise UsageError(f"{name}: {key} must be positive, and is {text}")
    return number
