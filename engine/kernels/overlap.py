# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""Launches that begin while the kernel before them ends: programmatic dependent launch, on NVIDIA since Hopper.

A kernel that is launched so must call `after_kernels_before` before it touches what any earlier kernel reads or writes;
weights it may read before, because nothing on the device writes them.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels import chip

_FIRST_CAPABILITY = 9


@triton.jit
def after_kernels_before(PDL: tl.constexpr):
    """Wait until all earlier kernels are done, and let the next one begin; nothing unless `PDL`.

    Let begin earlier, kernels that wait for one another would pile up, and hold room that those ahead of them need.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def overlaps() -> bool:
    """Return whether launches may be so, as far as the compiler and the machine's GPU, if it has one, say."""
    return chip.speaks_ptx() and _is_new_enough()


@functools.cache
def _is_new_enough() -> bool:
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= _FIRST_CAPABILITY


def options(pdl: bool) -> dict[str, bool]:
    """Return launch options: compilers of other makers and the interpreter know none for this."""
    return {"launch_pdl": True} if pdl else {}
