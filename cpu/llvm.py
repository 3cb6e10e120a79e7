"""Functions of LLVM's intermediate representation, compiled for this processor; only this file calls its compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import llvmlite.binding as binding
import llvmlite.ir as ir

INT64, POINTER = ir.IntType(64), ir.PointerType()
# kernel(start, stop, table) works on [start, stop) of what the table describes.
KERNEL = ir.FunctionType(ir.VoidType(), [INT64, INT64, POINTER])
_CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p)
_engines: list[binding.ExecutionEngine] = []  # own the machine code


@lru_cache(maxsize=1)
def _machine() -> binding.TargetMachine:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features().flatten()
    target = binding.Target.from_triple(binding.get_process_triple())
    return target.create_target_machine(binding.get_host_cpu_name(), features, opt=2, jit=True)


def new_kernel() -> tuple[ir.Function, ir.IRBuilder]:
    """A function `kernel` in a module of its own, and where its instructions go."""
    module = ir.Module()
    module.triple = binding.get_process_triple()
    module.data_layout = str(_machine().target_data)
    function = ir.Function(module, KERNEL, "kernel")
    function.attributes.add("nounwind")
    return function, ir.IRBuilder(function.append_basic_block())


def compiled(function: ir.Function) -> Callable[[int, int, Any], None]:
    """A function as a call of (start, stop, table) that releases the interpreter's lock."""
    machine = _machine()
    module = binding.parse_assembly(str(function.module))
    module.verify()
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = False  # instructions work on several lanes as they are
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _engines.append(engine)
    return _CALL(engine.get_function_address(function.name))
