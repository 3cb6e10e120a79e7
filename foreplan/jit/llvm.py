"""LLVM's compiler for this processor; only this file calls it, and it is imported where something must be compiled."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import llvmlite.binding as binding

Passes = Literal["none", "few", "usual", "loops"]

_engines: list[binding.ExecutionEngine] = []  # own the machine code
# What `llvmlite.ir` writes, and what code depends on: sizes, alignments and names are this machine's.
_UNKNOWN = 'target triple = "unknown-unknown-unknown"\ntarget datalayout = ""\n'


@lru_cache(maxsize=4)
def _machine(without: str = "") -> binding.TargetMachine:
    """The compiler for this processor, or for one without some of its features."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = ",".join(filter(None, (binding.get_host_cpu_features().flatten(), without)))
    target = binding.Target.from_triple(binding.get_process_triple())
    return target.create_target_machine(binding.get_host_cpu_name(), features, opt=2, jit=True)


def processor() -> tuple[str, str]:
    """The processor and its features, as LLVM names them."""
    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def machine_code(text: str, passes: Passes, without: str = "") -> bytes:
    """A module as an object file.

    Args:
        text: in LLVM's intermediate representation.
        passes, without: see `foreplan.jit.machine.Module`.
    """
    code: bytes = _machine(without).emit_object(optimized(text, passes, without))
    return code


def address_of(code: bytes, name: str) -> int:
    """The address of a function of an object file, which is placed in memory for good."""
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    address: int = engine.get_function_address(name)
    return address


def optimized(text: str, passes: Passes, without: str = "") -> binding.ModuleRef:
    """A module after LLVM's passes."""
    known = f'target triple = "{binding.get_process_triple()}"\ntarget datalayout = "{_machine().target_data}"\n'
    module = binding.parse_assembly(text.replace(_UNKNOWN, known, 1))
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
