"""The order of kernels that are launched early ("programmatic dependent launch", on Hopper and later)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def grid_wait(PDL: tl.constexpr):
    """Until the kernel before has ended and what it wrote is there; the one behind may begin from then on. So
    what two kernels before wrote is there before a kernel begins."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
