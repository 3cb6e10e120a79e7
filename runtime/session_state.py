"""What a session keeps from step to step: as files, by name, and as other tools take it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from foreplan.base.arguments import choice, flag, path_of
from foreplan.base.errors import SessionError
from foreplan.graph import Graph, Kind
from foreplan.graph.adapter import AdapterZero
from foreplan.graph.origin import ModuleOrigin
from foreplan.lower.program import Program
from foreplan.planner import Plan
from foreplan.runtime.averages import averages_of, exchanged, keeps_averages, read_averages
from foreplan.runtime.engine import Place
from foreplan.runtime.magnitudes import adapters_with_magnitudes, at_norms, write_norms
from foreplan.runtime.stored_values import StoredValues
from foreplan.runtime.turn import Turn
from foreplan.runtime.world import World
from foreplan.runtime.world.agreement import together
from foreplan.runtime.world.digests import Digests
from foreplan.runtime.world.steps import StepNotes

if TYPE_CHECKING:
    import torch

    from foreplan.runtime.matching import Loaded

_AS_IT_IS: Mapping[str, str] = MappingProxyType({})
WAY_OUT = "load the last checkpoint, or bind again"


class SessionState:
    """The part of a session that writes and reads what it keeps. `Session` has the steps that change it.

    Attributes:
        program, plan: see `Session`.
        stored: see `Session`.
    """

    program: Program
    plan: Plan
    stored: StoredValues
    _stored: Mapping[str, Place]
    _turn: Turn
    _world: World  # the ranks that run it
    _notes: StepNotes
    _absent: set[str]  # values without content, until they are loaded or assigned
    _mark: list[str]  # what has interrupted a step or a load; one for all sessions that train the same values
    _graphs: tuple[Graph | None, Graph | None]  # the model, and its whole step
    _averaged: bool  # whether weights hold their averages

    @property
    def _broken(self) -> str:
        """What has interrupted a step or a load."""
        return self._mark[0]

    @_broken.setter
    def _broken(self, why: str) -> None:
        self._mark[0] = why

    def _settle(self) -> None:
        """Wait for the step that has begun, if any."""
        raise NotImplementedError

    def save(self, path: str | Path, *, ema: bool = False) -> None:
        """Write all stored values to a safetensors file: `load` continues from it bit for bit. Of several ranks, all
        call this, and the first one writes; the file is the same, however many there are, and whatever each holds.

        Args:
            path: of the file.
            ema: write the model alone, with the averages that the optimizer keeps (`optim.AdamW(ema=0.999)`) in the
                place of its trained weights; to start from them, or to evaluate.

        Raises:
            UsageError, SessionError: the file cannot be written; an older one at the same place is as it was. Or there
                are no averages.
        """
        from foreplan.runtime.checkpoint import save_checkpoint

        text, ema = path_of("save", path), flag("ema", ema)
        with self._turn.lock:
            self._settle()
            self._refuse_if_broken()
            averages = averages_of(self.program, self._stored, self._world) if ema else None
            save_checkpoint(text, self.program, self._stored, averages, self._world)

    def load(
        self,
        path: str | Path,
        *,
        state: bool = True,
        strict: bool = True,
        prefix: str = "",
        rename: Mapping[str, str] = _AS_IT_IS,
        transpose: Iterable[str] = (),
        skip: Iterable[str] = (),
    ) -> Loaded:
        """Read a file that `save` wrote, or a safetensors file of another tool; a file of only parameters and buffers
        leaves all else as it is. Of several ranks, all call this.

        Where a weight has an adapter whose magnitudes (DoRA) are still its norms, and the file has none, they become
        the norms of what was read.

        With any of the arguments below, only parameters and buffers are read: the optimizer's state, the step count and
        the random state stay as they are. PyTorch's `num_batches_tracked` is
        passed over where the session has none, and stays as it is where the file has none.

        Args:
            path: of the checkpoint, or of the index (`….safetensors.index.json`) of one in several files.
            state: False reads only parameters and buffers.
            strict: the file must have all that is read, with its shapes and types, and nothing else. If False, values
                that it lacks stay as they are, other tensors are passed over, floating-point types are converted, and a
                matrix that fits the other way round alone is transposed.
            prefix: a beginning of the file's names that is left out: "module".
            rename: parts of the file's names, and what they are called here: {"fc": "head"}; {"": "backbone"} puts a
                part before every name.
            transpose: patterns of matrices that the file has the other way round.
            skip: patterns of values that stay as they are.

        Returns:
            What was read, and what was not; it prints as text.

        Raises:
            SessionError: the file is damaged, of another model, or has the state of another optimizer; the session is
                unchanged. If writing the values is interrupted, the session refuses to run until the next `load`; so it
                does where another rank cannot read its file, or has read something else.
            UsageError: a pattern means nothing.
        """
        from foreplan.runtime.checkpoint import load_checkpoint
        from foreplan.runtime.matching import Names

        text, names = path_of("load", path), Names.of(prefix, rename, transpose, skip)
        state, strict = flag("state", state), flag("strict", strict)
        with self._turn.lock:
            self._settle()
            self._refuse_if_averaged()
            before = self._broken
            following = at_norms(adapters_with_magnitudes(self.program.tensors), self._stored)
            digests = Digests(self._world, self.program.of_stage)
            with together(self._world, "what they load") as facts:
                loaded, whole = load_checkpoint(
                    text, self.program, self._stored, state, strict, names, self._load_begun, digests, self._origin
                )
                facts["the number of steps"] = None if self.program.step_count is None else self._updates
            digests.agree("what they have loaded")
            self._notes.read(digests.found)
            self._absent.difference_update(loaded.read)
            write_norms([each for each in following if each.magnitude not in loaded.read], self._stored)
            self._broken = before
            if whole:
                for slot in self.program.tensors:
                    if slot.kind is Kind.ACCUMULATOR:  # an interrupted step may have left sums
                        self._stored[slot.name].fill(lambda sums: sums.fill(0))
                self._broken = ""
            return loaded

    def state_dict(self, *, ema: bool = False, merged: bool = False) -> dict[str, np.ndarray]:
        """Copies of the model's own values by name: weights, trained and frozen ones, and running statistics. For a
        model that came from a PyTorch module, all that the module's own `state_dict` has: tied weights by each of their
        names, and constant buffers. A session of a plan file knows none of these.

        Args:
            ema: trained weights are the averages that the optimizer keeps (`optim.AdamW(ema=0.999)`). Before the first
                step these are the weights themselves.
            merged: without adapters, whose changes are added to the weights, as in the model that `foreplan.lora` took.

        Raises:
            SessionError: there are no averages.
        """
        own = (Kind.PARAMETER, Kind.FROZEN, Kind.BUFFER)
        ema, merged = flag("ema", ema), flag("merged", merged)
        with self._turn.lock:
            self._settle()
            state = {slot.name: self.stored[slot.name] for slot in self.program.tensors if slot.kind in own}
            if ema:
                state = read_averages(averages_of(self.program, self._stored, self._world), state)
        if merged:
            from foreplan.runtime.adapters import merged as without_adapters

            state = without_adapters(self.program, state)
        return self._origin.completed(state)

    @property
    def _origin(self) -> ModuleOrigin:
        """What the module that the model came from has beside what is stored; nothing, if it came from elsewhere."""
        found: object = self._graphs[0]
        while isinstance(found, Graph):  # a model with adapters came from one without them
            found = found.origin
        return found if isinstance(found, ModuleOrigin) else ModuleOrigin()

    @property
    def keeps_averages(self) -> bool:
        """Whether the optimizer keeps averages of weights (`optim.AdamW(ema=0.999)`). The ranks of stages, of which not
        all may train something, read it at the same time.
        """
        return keeps_averages(self.program, self._world)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let trained weights hold the averages that the optimizer keeps until the block ends, for sessions that share
        them: `with session.averaged(): evaluation.step(batch)`. The host keeps a copy of the weights meanwhile.

        This session runs no step, saves and loads nothing meanwhile, and none that shares its weights may train them.

        Raises:
            SessionError: there are no averages, or a step was interrupted.
        """
        with self._turn.lock:
            self._settle()
            self._refuse_if_broken()
            averages = averages_of(self.program, self._stored, self._world)
            exchange = exchanged(averages, self._stored, self._turn)
            self._averaged = True
        try:
            with exchange:
                yield
        finally:
            self._averaged = False

    def save_adapters(self, folder: str | Path) -> None:
        """Write the adapters that `foreplan.lora` gave the model as PEFT does, into a folder of two files, with what
        else is trained, such as a new head.

        Raises:
            UsageError, SessionError: the model has no adapters, or the folder cannot be written.
        """
        from foreplan.runtime.adapters import save_adapters

        text = path_of("save_adapters", folder)
        with self._turn.lock:
            self._settle()
            self._refuse_if_broken()
            save_adapters(text, self.program, self._stored, self._world)

    def load_adapters(self, folder: str | Path) -> None:
        """Read adapters that `save_adapters` or PEFT wrote; the optimizer's state stays as it is.

        Raises:
            SessionError: the files are damaged, or of another model, rank or alpha; the session is unchanged.
        """
        from foreplan.runtime.adapters import load_adapters

        text = path_of("load_adapters", folder)
        with self._turn.lock:
            self._settle()
            self._refuse_if_averaged()
            before, digests = self._broken, Digests(self._world, self.program.of_stage)
            with together(self._world, "the adapters that they load"):
                load_adapters(text, self.program, self._stored, self._load_begun, digests)
            digests.agree("the adapters that they have loaded")
            self._notes.read(digests.found)
            self._broken = before

    def to_torch(self, module: torch.nn.Module) -> None:
        """Write weights, changed by their adapters, running statistics and whatever else forward writes into a PyTorch
        module with the same names.

        Raises:
            UsageError, SessionError: see `foreplan.runtime.torch_state.write_state`.
        """
        from foreplan.runtime.torch_state import write_state

        state = self.state_dict(merged=True)
        write_state(state, module, {name: self.stored[name] for name in self._origin.unlisted - state.keys()})

    def to_onnx(self, path: str | Path, form: str = "model") -> list[Path]:
        """Write the model with its present weights as an ONNX file, for other tools.

        Args:
            path: of the file. Where the model has 2 GiB or more, its weights go to a file beside it, `<path>.data`.
            form: `model`: the ONNX file that the model came from, as it was, with the
                weights that this session holds; adapters are merged into them. A model that came from elsewhere, or
                was cut, as `graph`. `graph`: foreplan's own graph of the model, in inference form, with its adapters.
                `step`: the whole training step; what it changes are further inputs and outputs, `x` and `x/next`, and
                the present content is the inputs' default. Metadata of its values and nodes says where the plan puts
                them, and when: `plan.offset`, `plan.lower` and so on.

        Returns:
            The files: the model's, and the one beside it if there is one.

        Raises:
            UsageError: the form is none of these, a plan file was loaded, which has no graph, or the step accumulates
                gradients; or the file cannot be written.
            UnsupportedError: standard ONNX cannot say a node, or a weight cannot go back into the file; names it.
            ModelError: the model's file is needed for what the session does not hold, and is gone or another one.
        """
        from foreplan.export import FORMS, write_onnx
        from foreplan.runtime.places import places_of_values, runs_of_actions

        text = path_of("to_onnx", path)
        with self._turn.lock:
            self._settle()
            self._refuse_if_broken()
            choice("form", form, FORMS)
            held = self.state_dict(merged=True) if form == "model" and self._has_adapters else self.stored
            facts = [f(self.program, self.plan) for f in (places_of_values, runs_of_actions)] if form == "step" else []
            return write_onnx(text, form, *self._graphs, held, *facts)

    @property
    def _has_adapters(self) -> bool:
        return any(isinstance(slot.init, AdapterZero) for slot in self.program.tensors)

    @property
    def steps_done(self) -> int:
        """The number of updates so far."""
        with self._turn.lock:
            return self._updates

    @property
    def _updates(self) -> int:
        count = self.program.step_count
        return 0 if count is None else int(self._stored[count.name].read())

    def _load_begun(self) -> None:
        """From here on values are written."""
        self._broken = "loading a checkpoint has not ended"

    def _refuse_if_averaged(self) -> None:
        if self._averaged:
            raise SessionError("the weights hold their averages: leave the block of `averaged` first")

    def _refuse_if_broken(self) -> None:
        self._refuse_if_averaged()
        self._refuse_if_interrupted()

    def _assigned(self, name: str, array: np.ndarray) -> None:
        self._absent.discard(name)
        self._notes.assign(name, array)

    def _refuse_if_interrupted(self) -> None:
        if self._absent:
            first, count = min(self._absent), len(self._absent)
            raise SessionError(
                f"{first!r}{f' and {count - 1:,} more tensors have' if count > 1 else ' has'} no content, as the "
                "module was on PyTorch's device meta when it was imported; load them (session.load), or assign each "
                f"(session.stored[{first!r}] = array)"
            )
        if self._broken:
            raise SessionError(
                f"a step or a load was interrupted ({self._broken}), so parameters and state may be half updated; "
                f"{WAY_OUT}"
            )
