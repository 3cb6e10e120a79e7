"""The options of a step that one process runs: each is said once, with its name, type, default and meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from foreplan.base.arguments import REMAT, flag, parts_in
from foreplan.options import checks as option_checks
from foreplan.options.fields import grouped, option

if TYPE_CHECKING:
    from foreplan.lower.target import Target
    from foreplan.passes.optimizer import Optimizer

PRECISIONS = ("float32", "bf16", "fp16")
_engine, _training, _memory = map(grouped, ("Target and precision", "Training", "Memory"))


@dataclass(frozen=True)
class StepOptions:
    """What one process needs to know of a step. `Options` has those of several ranks besides."""

    loss: Any = field(
        default=None,
        metadata=option(
            "What is minimised: one of `foreplan.losses`, or a traceable function of the model's outputs; None: "
            "inference, or the loss that the graph has.",
            more="See `differentiate`.",
            of_model=True,
        ),
    )
    optimizer: Optimizer | None = field(
        default=None,
        metadata=option(
            "One of `foreplan.optim`; None: the step returns gradients and updates no parameter.", of_model=True
        ),
    )
    _: KW_ONLY
    target: str | Target = field(
        default="auto",
        metadata=_engine(
            "The engine to plan for: numpy, cpu (oneDNN and compiled loops), or a card such as cuda:h100; auto is cpu "
            "where oneDNN is installed, and numpy where it is not.",
            more='"cpu" takes all cores, "cpu:threads=2" two of them; "cuda" is the card in this machine.',
            files=option_checks.target_files,
            flag="--target",
            value="TARGET",
        ),
    )
    budget: int | float | str | None = field(
        default=None,
        metadata=_memory(
            "The most memory, such as 2GiB or 512MiB: on a card, of the whole process; on the host, of the arena. Or a "
            "share, such as 0.5, of the arena without recomputation.",
            check=option_checks.budget,
            flag="--budget",
            value="SIZE",
        ),
    )
    remat: str = field(
        default="auto",
        metadata=_memory(
            "What may be recomputed to save memory: nothing (off), or as little as meets the budget and, without a "
            "budget, what adds at most 1 % to the predicted time (auto).",
            more="Without a budget, narrow copies of weights are made again beyond that 1 % where that saves memory.",
            flag="--remat",
            choices=REMAT,
        ),
    )
    outputs: Iterable[str] | None = field(
        default=None,
        metadata=_training(
            "Return these outputs of the model as well.",
            more="None: nothing beside the loss in training, all of the model's outputs in inference.",
            check=option_checks.some_names,
            several=True,
            flag="--output",
            value="NAME",
            of_model=True,
            with_stages=False,
        ),
    )
    gradients: Iterable[str] = field(
        default=(),
        metadata=_training(
            "Return the gradients of these inputs as well.",
            more="`Result.gradients` has them by name.",
            check=option_checks.names,
            flag="--gradient",
            value="NAME",
            of_model=True,
            with_stages=False,
        ),
    )
    train: Iterable[str] = field(
        default=(),
        metadata=_training(
            "Train these weights too: a name, a part of the model such as head, or a pattern such as 'h.*.attn'.",
            more="Where it and `freeze` mean the same weight, the one that says more of the name counts: with "
            "`freeze=['*'], train=['head']`, the head alone is trained. Tables and masks of the model are trained only "
            "where the last part of their name is said.",
            check=option_checks.names,
            flag="--train",
            value="NAME",
            of_model=True,
        ),
    )
    freeze: Iterable[str] = field(
        default=(),
        metadata=_training(
            "Freeze these weights, named as for train: they get no gradient, no optimizer state and no update.",
            more="Batch normalisation whose scale and bias are frozen uses its running statistics, and keeps them.",
            check=option_checks.names,
            flag="--freeze",
            value="NAME",
            of_model=True,
        ),
    )
    batch_norm: str = field(
        default="train",
        metadata=_training(
            "What batch normalisation uses: statistics of the batch, which update the running ones (train); those of "
            "all ranks' batches together (sync); or the running ones, unchanged (frozen).",
            more="With several ranks, train normalises each rank's batch by itself. Running statistics then differ "
            "from rank to rank, and a checkpoint has those of the first one. With sync, as in PyTorch's SyncBatchNorm, "
            "ranks come to what one process does with all samples. Each layer then exchanges two vectors of channels "
            "forward, and two backward.",
            flag="--batch-norm",
            choices=("train", "sync", "frozen"),
            of_model=True,
        ),
    )
    checkpoint: Iterable[str] | None = field(
        default=None,
        metadata=_memory(
            "Recompute these segments of the model, and nothing else: layer1, or 'h.*' for h.0, h.1 and so on each by "
            "itself, or conv2..conv5. By default those of a PyTorch module that calls `torch.utils.checkpoint`, where "
            "nothing else says what is recomputed; none: [].",
            more="This is `torch.utils.checkpoint` by name, instead of `budget` and `remat`: what a segment computes "
            "is dropped when the forward pass has left it, and computed once more for its backward pass. What it "
            "reads, and what others read of it, stays.",
            check=option_checks.some_names,
            several=True,
            flag="--checkpoint",
            value="SCOPE",
            with_stages=False,
        ),
    )
    keep: Iterable[str] = field(
        default=(),
        metadata=_memory(
            "Keep these activations until their last use: a name, a part of the model or a pattern such as 'h.*.attn'.",
            more="They are neither recomputed nor copied to the host; all else is the planner's choice. Where `keep`, "
            "`recompute` and `to_host` mean the same activation, the one that says more of its name counts.",
            check=option_checks.names,
            flag="--keep",
            value="NAME",
            with_stages=False,
        ),
    )
    recompute: Iterable[str] = field(
        default=(),
        metadata=_memory(
            "Drop these activations when the forward pass has used them, and compute them again for the backward pass.",
            more="Named as for `keep`. What one scope of a pattern hands to the next, as blocks of 'h.*' do, stays the "
            "planner's choice, and so does all else: unlike `checkpoint`, it goes with `budget` and `remat`.",
            check=option_checks.names,
            flag="--recompute",
            value="NAME",
            with_stages=False,
        ),
    )
    to_host: Iterable[str] = field(
        default=(),
        metadata=_memory(
            "Copy these activations to host memory when the forward pass has used them, and back for the backward one.",
            more="Named as for `keep`. They must go there; with `offload` others may, where that takes less time.",
            check=option_checks.names,
            flag="--to-host",
            value="NAME",
            with_stages=False,
        ),
    )
    split: Mapping[str, int] | Iterable[str] = field(
        default=(),
        metadata=_memory(
            "Run these segments in so many parts, one after the other: 'h.*.mlp=4', or conv1..conv2=8.",
            more="In Python also a mapping, `split={'h.*.mlp': 4}`. Names are as for `checkpoint`. A part is a range "
            "of items, positions, channels or whatever axis keeps the most bytes from being whole. Results of parts "
            "lie side by side, or are added up in place. What only the segment reads then exists a part at a time. A "
            "range that ends in `loss`, such as h.6..loss, is split along the batch: each part runs forward, and back "
            "to the first operation, before the next one.",
            check=parts_in,
            flag="--split",
            value="SCOPE=K",
            of_model=True,
            with_stages=False,
        ),
    )
    fission: str = field(
        default="auto",
        metadata=_memory(
            "Let the planner run parts of the model one after the other, too (auto), or only what --split names (off).",
            more="A training step runs what lies between two convolutions in parts, where one activation dominates and "
            "that adds at most 1 % to the predicted time. Within a budget it may run layers up to the loss, and back, "
            "some samples at a time, or more between convolutions, where recomputation would take longer. "
            "Inference that does not meet its budget runs the stretch in which most is alive in parts: some images, "
            "rows or channels at a time, with as little more work as that takes. With `split`, nothing else is split.",
            flag="--fission",
            choices=("auto", "off"),
        ),
    )
    accumulate: int | str = field(
        default=1,
        metadata=_memory(
            "Run this number of micro-batches, each of the batch, and update once with their mean gradients; or auto: "
            "split the batch into as few micro-batches as fit the budget or, without one, the card's memory.",
            more='With "auto", `compile` takes a function instead of a graph, which makes the model from its `batch`; '
            "the default of this parameter is the whole batch. Micro-batches are equal, so their number divides it; "
            "`Compiled.accumulate` tells it. Nothing more is recomputed than without a budget, unless micro-batches of "
            "one sample do not fit either. "
            "That is a step on all samples at once, if the loss is a mean over as many samples in each, and if no"
            " sample's loss depends on other samples (as batch norm makes it). With more than 1, `Session.step` "
            "takes all micro-batches at once, along a further leading axis of every input without a default.",
            flag="--accumulate",
            value="K",
            least=1,
            words=("auto",),
            of_model=True,
        ),
    )
    offload: bool = field(
        default=False,
        metadata=_memory(
            "Copy activations to host memory and back where that takes less time than to recompute them.",
            more="The time is that of the target's bus. Copies count as recomputation does, but with `remat` off a "
            "budget is met by copies alone.",
            check=flag,
            flag="--offload",
            with_stages=False,
        ),
    )
    prefetch: bool = field(
        default=False,
        metadata=_engine(
            "Plan a second slot for inputs, into which a card copies the next batch while a step runs.",
            more="It takes as many bytes as the inputs without a default. `Session.steps` uses it. Other targets run "
            "the same, and no faster for it.",
            check=flag,
            flag="--prefetch",
        ),
    )
    prepack: bool = field(
        default=False,
        metadata=_engine(
            "Lay out weights once, when they are loaded, in the order in which their kernels read them; for inference.",
            more="A weight whose readers want other orders stays as it is. A session shows weights as before; one that "
            "trains cannot share them (`bind`). Targets but cpu change nothing.",
            check=flag,
            flag="--prepack",
        ),
    )
    precision: str = field(
        default="float32",
        metadata=_engine(
            "Compute in bfloat16 (bf16) or float16 (fp16); parameters, optimizer state and sums stay float32.",
            more="Images, hidden states and their gradients take half the bytes. Parameters, optimizer state, "
            "statistics, losses, inputs and what a step returns are float32. With fp16 an optimizer gets "
            "gradients of a scaled loss; the scale is one with which no gradient overflows.",
            flag="--precision",
            choices=PRECISIONS,
            of_model=True,
        ),
    )
    narrow_weights: bool = field(
        default=False,
        metadata=_engine(
            "Train weights that the model has in float16 or bfloat16 as they are, and not in float32.",
            more="Most updates are then lost to rounding: in bfloat16, a weight of 0.25 does not move by less than "
            "0.0005.",
            check=flag,
            flag="--narrow-weights",
            of_model=True,
        ),
    )
    tune: bool = field(
        default=False,
        metadata=_engine(
            "Choose kernels by measuring each once on this machine, and keep what was measured.",
            more="It takes seconds the first time. Plans then depend on what was measured.",
            check=flag,
            flag="--tune",
        ),
    )
    accuracy: str = field(
        default="default",
        metadata=_engine(
            "Leave out kernels that round more than sums of products do (strict): Winograd's for convolutions, and on "
            "cards those by Fourier transforms.",
            more="They multiply sums of numbers, so that the errors of results are one to four times as large. Steps "
            "with many convolutions of 3 × 3 taps then take longer.",
            flag="--accuracy",
            choices=("default", "strict"),
        ),
    )
    workspace: int | str = field(
        default="auto",
        metadata=_engine(
            "The most scratch memory of one action where a kernel with less exists: a size, unlimited, or auto, which "
            "is 64MiB, or more where that is 1.3 times as fast.",
            more="Kernels within it are chosen by time and by what room the peak leaves.",
            check=option_checks.workspace,
            flag="--workspace",
            value="SIZE",
        ),
    )
