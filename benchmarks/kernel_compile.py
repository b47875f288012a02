"""Compiles every kernel for chips that need not be here, from the very launches that the launchers make.

A launch on CPU tensors is caught before the driver and gives signature, constants and options. What came out is a fact
sheet per launch and chip (matrix instructions, shared memory), kept by a hash of source, constants and
compiler: `python -m benchmarks.kernel_compile --update FILE` compiles only what is not there.
"""

import argparse
import functools
import hashlib
import inspect
import json
import re
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks.kernel_case import Case
from benchmarks.kernel_cases import CASES
from benchmarks.kernel_hazards import open_products
from engine.kernels import chip as kernels_chip
from engine.kernels.ops import TRITON


@dataclass(frozen=True)
class Chip:
    """What is compiled for, and what launchers are told about it."""

    target: GPUTarget
    matrix: str
    """Matrix instructions."""
    stores: str
    """Stores to global memory: a kernel without any does nothing."""
    ptx: bool = True
    tensor_memory: bool = False


_STORES = r"st\.global|st\.async|red\.|atom\."
_TENSOR_MEMORY = {"matrix": r"tcgen05\.mma|mma\.sync", "stores": _STORES, "tensor_memory": True}
CHIPS = {
    "sm_90": Chip(GPUTarget("cuda", 90, 32), r"wgmma\.mma_async|mma\.sync", _STORES),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), **_TENSOR_MEMORY),
    "sm_103": Chip(GPUTarget("cuda", 103, 32), **_TENSOR_MEMORY),
    "gfx950": Chip(GPUTarget("hip", "gfx950", 64), "v_mfma", "(buffer|global|flat)_(store|atomic)", ptx=False),
}
_COLUMNS = 512
"""Of tensor memory."""
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg", "launch_pdl")
_NVIDIA_OPTIONS = ("maxnreg", "launch_pdl")
_TYPES = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16",
    torch.int32: "*i32", torch.int64: "*i64", torch.float16: "*fp16", torch.bool: "*i1",
    torch.uint32: "*u32", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One kernel as one call compiles it."""

    function: JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[int, ...]
    options: dict[str, Any]

    def key(self, chip: str) -> str:
        """Return what identifies the compiled result."""
        said = (self.function.cache_key, self.signature, sorted(self.constants.items()), self.aligned,
                sorted(self.options.items()), chip, triton.__version__)  # fmt: skip
        return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def caught(function: JITFunction, args: tuple[object, ...], keywords: dict[str, Any]) -> Launch:
    """Describe a launch as Triton's own specialisation would."""
    options = {"enable_fp_fusion": True} | {k: keywords.pop(k) for k in OPTIONS if k in keywords}
    bound = inspect.signature(function.fn).bind(*args, **keywords).arguments
    signature, constants, aligned = {}, {}, []
    for i, parameter in enumerate(function.params):
        value = bound[parameter.name]
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (special and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                aligned.append(i)
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if special and value % 16 == 0:
                aligned.append(i)
    return Launch(function, signature, constants, tuple(aligned), options)


def launches(case: Case, size: dict[str, int], chip: Chip) -> list[Launch]:
    """Return the launches of an op at a size on a chip, without running them."""
    found: list[Launch] = []

    def catch(self: JITFunction, *args: object, grid: object, warmup: bool, **keywords: Any) -> None:  # noqa: ARG001
        found.append(caught(self, args, keywords))

    inputs = case.make(torch.Generator("cpu").manual_seed(0), size)
    with (
        patch.object(JITFunction, "run", catch),
        patch.object(kernels_chip, "speaks_ptx", lambda: chip.ptx),
        # What only Hopper takes compiles for the others, too.
        patch.object(kernels_chip, "sums_alike", lambda: True),
        patch.object(kernels_chip, "has_tensor_memory", lambda _: chip.tensor_memory),
    ):
        TRITON.load(case.op)(*inputs.args, **inputs.keywords)
    return found


def facts(launch: Launch, name: str) -> dict[str, Any]:
    """Compile a launch for a chip; raises what the compiler raises, and if it left the body out."""
    chip, constants = CHIPS[name], launch.constants
    source = ASTSource(
        fn=launch.function,
        signature=launch.signature,
        constexprs={(i,): constants[n] for i, n in enumerate(launch.signature) if n in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i in launch.aligned},
    )
    options = {k: v for k, v in launch.options.items() if chip.ptx or k not in _NVIDIA_OPTIONS}
    made = triton.compile(source, target=chip.target, options=options)
    text = made.asm.get("ptx") or made.asm["amdgcn"]
    columns = getattr(made.metadata, "tmem_size", None) or 0
    if columns > _COLUMNS or not re.search(chip.stores, text):
        raise RuntimeError(f"{launch.function.__name__} for {name} has no body; {columns} columns of tensor memory")
    if unsafe := open_products(made.asm["ttgir"]):
        raise RuntimeError(f"{launch.function.__name__} for {name} writes a factor that may still be read: {unsafe}")
    matrix = sorted(set(re.findall(chip.matrix, text)))
    found = {"kernel": launch.function.__name__, "chip": name, "matrix": matrix, "shared": made.metadata.shared}
    if "dot" in made.asm["ttgir"] and not matrix:
        found["product_without_matrix_unit"] = True
    return found


@functools.cache
def wanted(name: str, only: str | None = None) -> list[tuple[str, Launch]]:
    """Return each distinct launch of the real sizes on a chip, with its op; of one op if named."""
    found: dict[str, tuple[str, Launch]] = {}
    for case in CASES:
        if only not in (None, case.op):
            continue
        for size in case.compiled or case.large[:1]:
            for launch in launches(case, size, CHIPS[name]):
                found.setdefault(launch.key(name), (case.op, launch))
    return list(found.values())


def _task(at: tuple[int, str]) -> tuple[str, dict[str, Any]]:
    op, launch = wanted(at[1])[at[0]]
    return launch.key(at[1]), {"op": op, **facts(launch, at[1])}


def kept_and_missing(known: dict[str, Any], chips: tuple[str, ...]) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """Return the known facts that still hold, and what is to be compiled: number among the wanted, chip."""
    kept, missing = {}, []
    for chip in chips:
        for i, (_, launch) in enumerate(wanted(chip)):
            key = launch.key(chip)
            if key in known:
                kept[key] = known[key]
            else:
                missing.append((i, chip))
    return kept, missing


def write(path: Path, facts_by_key: dict[str, Any]) -> None:
    """Write facts in a stable order, a line each."""
    rows = sorted(facts_by_key.items(), key=lambda row: (row[1]["op"], row[1]["kernel"], row[1]["chip"], row[0]))
    path.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", type=Path, required=True)
    parser.add_argument("--chips", default=",".join(CHIPS))
    options = parser.parse_args()
    known = json.loads(options.update.read_text()) if options.update.exists() else {}
    kept, missing = kept_and_missing(known, tuple(options.chips.split(",")))
    with ProcessPoolExecutor(2) as pool:
        # Written as they come: compiling all takes minutes.
        for done in as_completed([pool.submit(_task, one) for one in missing]):
            key, found = done.result()
            kept[key] = found
            write(options.update, kept)
            print(found, flush=True)
    write(options.update, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
