"""What a step is compiled with.

`compile` takes options as arguments, commands take them as flags, and a plan file keeps them as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from foreplan.base.arguments import SHARDS
from foreplan.base.errors import UsageError
from foreplan.base.patterns import ActivationChoices, Selection
from foreplan.options import checks as option_checks
from foreplan.options.fields import OptionInfo, grouped, info_of, keep_checked, option
from foreplan.options.step_options import StepOptions

if TYPE_CHECKING:
    from foreplan.passes.pipeline import Change

_ranks = grouped("Ranks")


@dataclass(frozen=True)
class Options(StepOptions):
    """What a step is compiled with. `describe` gives the meaning of each option, as does `help(foreplan.compile)`.

    Raises:
        UsageError: a value that an option does not take.
    """

    _: KW_ONLY
    ranks: int = field(
        default=1,
        metadata=_ranks(
            "Plan for so many ranks: processes that train on different samples and end each step with the same "
            "weights.",
            more="The batch of the model is that of one rank. A launcher such as `mpirun -n 4` starts them; all run "
            "the same plan. The loss that a step returns is the mean of theirs, and so are gradients.",
            flag="--ranks",
            value="N",
            least=1,
            of_model=True,
        ),
    )
    shard: str = field(
        default="none",
        metadata=_ranks(
            "What is divided among ranks: the optimizer's state, also gradients, or also parameters.",
            more="As ZeRO's stages 1, 2 and 3 (Rajbhandari et al. 2020).",
            flag="--shard",
            choices=SHARDS,
            of_model=True,
        ),
    )
    tensor: int = field(
        default=1,
        metadata=_ranks(
            "Split the weights of products over so many neighbouring ranks, which take the same samples.",
            more="As in Megatron-LM (Shoeybi et al. 2019, Korthikanti et al. 2022): attention by heads, dense layers "
            "by columns and rows, and what lies between these by tokens.",
            flag="--tensor",
            value="N",
            least=1,
            of_model=True,
        ),
    )
    stages: int = field(
        default=1,
        metadata=_ranks(
            "Cut the model into so many pipeline stages, each on ranks of its own; micro-batches go through them one "
            "after the other.",
            more="Cuts are where stages take about as long, and the fewest bytes cross. `accumulate` says how many "
            "micro-batches there are. Neighbouring ranks have the same `stage`; `foreplan.compiler.staged` has all.",
            flag="--stages",
            value="N",
            least=1,
            of_model=True,
        ),
    )
    stage: int = field(
        default=0,
        metadata=_ranks(
            "The stage to compile, from 0 on: that of this process, where it runs.", flag="--stage", value="N", least=0
        ),
    )
    links: str = field(
        default="",
        metadata=_ranks(
            "The links between ranks, for predicted times: the link in a node, how many devices a node has, and the "
            "link between nodes, such as nvlink4*8+infiniband-ndr.",
            more="What is left out is as the target is known for. docs/links.md has the names.",
            check=option_checks.text,
            flag="--links",
            value="LINKS",
        ),
    )
    share: Any = field(
        default=None,
        metadata=option(
            "For inference: a compiled step whose weights this one finds where they lie, by `bind(share=its session)`.",
            more="It says `ranks`, `shard` and `tensor`, too. Of one of several stages, give the session itself.",
            check=option_checks.lent,
            of_model=True,
        ),
    )
    passes: Change | None = field(
        default=None,
        metadata=option(
            "What changes the list of passes, for experiments, such as `foreplan.passes.without('fuse_maps')`.",
            check=option_checks.passes,
        ),
    )

    def __post_init__(self) -> None:
        keep_checked(self)

    def given(self, kind: Callable[[OptionInfo], bool]) -> list[str]:
        """The names of the options of a kind that are not the default."""
        named = [each.name for each in fields(self) if kind(info_of(each))]
        return [name for name in named if getattr(self, name) != getattr(USUAL, name)]

    @property
    def selection(self) -> Selection:
        """The weights that `train` and `freeze` name."""
        return Selection(tuple(self.train), tuple(self.freeze))

    @property
    def activations(self) -> ActivationChoices:
        """What `keep`, `recompute` and `to_host` say of activations."""
        return ActivationChoices(tuple(self.keep), tuple(self.recompute), tuple(self.to_host))

    @property
    def without_activations(self) -> Options:
        """The same, with nothing said of activations by name."""
        return replace(self, keep=(), recompute=(), to_host=())

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The segments that `split` names, with the number of parts of each."""
        pairs = (str(text).rpartition("=") for text in self.split)
        return tuple((scope, int(count)) for scope, _, count in pairs)

    @property
    def splits(self) -> bool:
        """Whether the planner may choose what runs in parts."""
        return self.fission == "auto" and not self.split and self.stages == 1

    def to_json(self) -> dict[str, Any]:
        """All but loss, optimizer and passes, by name. A target is its name, sizes are as given."""
        from foreplan.lower.targets import resolved

        found = {each.name: getattr(self, each.name) for each in _WITH_FLAG}
        found["target"] = resolved(self.target if isinstance(self.target, str) else self.target.name)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Options:
        """The options that `to_json` gave.

        Raises:
            UsageError: there is no such option, or it has no such value.
        """
        known = [each.name for each in _WITH_FLAG]
        if sorted(record) != sorted(known) or not isinstance(record["target"], str):
            raise UsageError(f"options are {', '.join(known)}; a target is a name")
        return Options(**record)

    def __str__(self) -> str:
        """Those that are not the defaults, as arguments of `compile`: `budget='2GiB', remat='off'`."""
        usual = USUAL.to_json()
        return ", ".join(f"{name}={value!r}" for name, value in self.to_json().items() if value != usual[name])


_WITH_FLAG = tuple(each for each in fields(Options) if info_of(each).flag)
USUAL = Options()
