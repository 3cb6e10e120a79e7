"""What may differ from one PyTorch user to the next, as options of `--as pytorch:zero=keep,loss=kept`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from foreplan.base.arguments import choice, names_in
from foreplan.base.errors import UsageError
from foreplan.base.units import parse_bytes

FRAMEWORKS = ("pytorch", "ddp", "fsdp2")
FREE = "free"  # without a limit
_CHOICES = {
    "zero": ("none", "keep"),
    "loss": ("dropped", "kept"),
    "output": ("dropped", "kept"),
    "grad": ("on", "off", "unused"),
    "gradients": ("freed", "kept"),
    "results": ("freed", "kept"),
    "relu": ("in_place", "new"),
    "optimizer": ("auto", "foreach", "fused", "loop"),
    "attention": ("auto", "flash", "efficient", "math", "eager"),
    "gelu": ("auto", "fused", "parts"),
    "device": ("auto", "cpu", "cuda"),
    "tf32": ("on", "off"),
    "parallel": ("none", "ddp"),
}


@dataclass(frozen=True)
class Variant:
    """How a training loop is written. The defaults are PyTorch's own, and what most users write.

    Attributes:
        zero: `zero_grad` sets gradients to None (none), or fills them with zeros and keeps them (keep).
        loss: a variable or a list keeps the loss of each step, or not.
        output: a variable keeps the model's output until the next one is there, or not.
        grad: history is kept and backward runs (on); `torch.no_grad` (off); history is kept, and backward never runs
            (unused), as in an evaluation without `no_grad`.
        gradients: gradients of activations are freed when they have been used; or each has a buffer of its own until
            backward ends (kept), as in simple frameworks.
        results: what layers give is freed when nobody reads it any more; or is kept until the step ends.
        relu: whether ReLUs write over their input where they may.
        optimizer: updates all parameters at once (foreach), so in one kernel (fused), or one by one (loop); auto: as
            PyTorch does on the device.
        attention: the kernel of `F.scaled_dot_product_attention`: flash, efficient, or math, which writes it out; auto:
            as PyTorch chooses on the device. eager: all attention of the model is written out by its author, as
            `attn_implementation="eager"` of transformers.
        gelu: `F.gelu` (fused), or written out by the model's author (parts), as `gelu_new` of transformers; auto: parts
            where it is written with a power, as that one is.
        device: cpu or cuda; auto: that of the target.
        checkpoint: parts of the model within `torch.utils.checkpoint`: names as for `compile`.
        workspace: what a convolution takes for its own duration: the first choice of cuDNN (free), or its first choice
            within a size. Where cuDNN cannot be asked, free counts none, and of a size each gradient of a convolution
            takes all. It is asked for the target's card, if it is installed.
        tf32: whether cuDNN may round float32 to TensorFloat-32 (`cudnn.allow_tf32`), by which it chooses other engines.
        parallel: one process (none), or one of several within `DistributedDataParallel` (ddp), with a batch of its own.
    """

    zero: str = "none"
    loss: str = "dropped"
    output: str = "dropped"
    grad: str = "on"
    gradients: str = "freed"
    results: str = "freed"
    relu: str = "in_place"
    optimizer: str = "auto"
    attention: str = "auto"
    gelu: str = "auto"
    device: str = "auto"
    checkpoint: Iterable[str] = ()
    workspace: int | str = FREE
    tf32: str = "on"
    parallel: str = "none"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            choice(name, getattr(self, name), choices)
        object.__setattr__(self, "checkpoint", tuple(names_in("checkpoint", self.checkpoint)))
        if self.workspace != FREE:
            try:
                object.__setattr__(self, "workspace", parse_bytes(self.workspace))
            except UsageError as error:
                raise UsageError(f"workspace: {error}; or it is {FREE!r}") from None

    @property
    def limit(self) -> int | None:
        """Bytes that a convolution may take; None: as many as cuDNN likes."""
        return None if self.workspace == FREE else int(self.workspace)

    def on(self, target: str) -> bool:
        """Whether the step runs on a card, for a plan of this target."""
        return self.device == "cuda" or (self.device == "auto" and target.startswith("cuda"))


def variant_options(text: str) -> dict[str, Any]:
    """The options of `Variant` that a text such as `pytorch:zero=keep,checkpoint=layer1+layer2` gives; `ddp` is
    `pytorch:parallel=ddp`. Those of `fsdp2:shard=layers.*+head` are beside `shard`, which is for `eager_memory`.

    Raises:
        UsageError: there is no such framework or no such option, or one is given twice.
    """
    name, _, rest = text.partition(":")
    framework = choice("--as", name.strip(), FRAMEWORKS)
    known = [each.name for each in fields(Variant)] + ["shard"] * (framework == "fsdp2")
    given: dict[str, Any] = {"parallel": framework} if framework == "ddp" else {}
    for part in rest.split(",") if rest else ():
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or key not in known:
            raise UsageError(f"--as {text!r}: {key!r} is no option; write pytorch:KEY=VALUE with {', '.join(known)}")
        if key in given:
            raise UsageError(f"--as {text!r}: {key} is given twice")
        given[key] = tuple(value.split("+")) if key in ("checkpoint", "shard") else value
    return given | {"shard": given.get("shard", ())} if framework == "fsdp2" else given
