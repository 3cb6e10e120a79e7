"""LLVM's compiler for this processor; only this file calls it. Machine code is kept on disk, under a name made from all
that it depends on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import llvmlite
import llvmlite.binding as binding
import llvmlite.ir as ir

from foreplan.disk_cache import claim, keep, kept, release
from foreplan.once import once

Passes = Literal["none", "few", "usual", "loops"]
_engines: list[binding.ExecutionEngine] = []  # own the machine code


@lru_cache(maxsize=4)
def _machine(without: str = "") -> binding.TargetMachine:
    """The compiler for this processor, or for one without some of its features."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = ",".join(filter(None, (binding.get_host_cpu_features().flatten(), without)))
    target = binding.Target.from_triple(binding.get_process_triple())
    return target.create_target_machine(binding.get_host_cpu_name(), features, opt=2, jit=True)


@lru_cache(maxsize=1)
def _compiler() -> tuple[str, ...]:
    """What all machine code here depends on: versions, and the processor."""
    versions = (llvmlite.__version__, *map(str, binding.llvm_version_info), binding.get_process_triple())
    return *versions, binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def prepare(module: ir.Module) -> None:
    """Let a module be one for this processor."""
    module.triple = binding.get_process_triple()
    module.data_layout = str(_machine().target_data)


@dataclass(frozen=True)
class Module:
    """A module to compile.

    Attributes:
        name: of the function that is called in it.
        key: all that it is made from, but versions and the processor.
        write: gives it in LLVM's intermediate representation, and a line that is kept with its machine code.
        what: what it is a part of, for people.
        passes: how much LLVM does before it makes machine code: "none" for loops that are written as they should run,
            "few" for long functions that compute with integers, "usual", or "loops", which also looks for loops that
            may work on several elements at once.
        without: features of the processor that it does not use, as LLVM names them: `-avx512f`.
    """

    name: str
    key: str
    write: Callable[[], tuple[str, str]]
    what: str = "loops"
    passes: Passes = "usual"
    without: str = ""

    @cached_property
    def file(self) -> str:
        """Under what name its machine code is kept."""
        about = "\n".join((*_compiler(), self.without, self.passes, self.key))
        return f"{self.name}-{hashlib.sha256(about.encode()).hexdigest()}.o"


def loaded(module: Module, *, store: bool = True) -> tuple[int, str]:
    """The address of a module's function, whose machine code is read from disk, or else made and kept; and its line.

    Args:
        store: whether to keep the machine code on disk.
    """
    content = kept(module.file) if store else None
    if content is None:
        with once(module.what):
            content = _made(module, store)
    line, _, code = content.partition(b"\n")
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(module.without))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(module.name), line.decode()


def _made(module: Module, store: bool) -> bytes:
    """A module's line and machine code. One process makes it, and others wait until it is on disk."""
    try:
        if store:
            claim(module.file)
            if (content := kept(module.file)) is not None:
                return content
        text, line = module.write()
        content = line.encode() + b"\n" + _machine_code(text, module)
        if store:
            keep(module.file, content)
        return content
    finally:
        release(module.file)


def _machine_code(text: str, module: Module) -> bytes:
    """An object file."""
    code: bytes = _machine(module.without).emit_object(optimized(text, module.passes, module.without))
    return code


def optimized(text: str, passes: Passes, without: str = "") -> binding.ModuleRef:
    """A module after LLVM's passes."""
    module = binding.parse_assembly(text)
    module.verify()
    if passes == "none":
        return module
    options = binding.create_pipeline_tuning_options(speed_level=1 if passes == "few" else 2)
    options.loop_vectorization = options.slp_vectorization = passes == "loops"
    builder = binding.create_pass_builder(_machine(without), options)
    builder.getModulePassManager().run(module, builder)
    return module


def assembly(text: str, passes: Passes) -> str:
    """What the processor runs of a module, for people."""
    return str(_machine().emit_assembly(optimized(text, passes)))
