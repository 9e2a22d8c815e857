"""The order of kernels that are launched early ("programmatic dependent launch", on Hopper and later), and
what the compiler is not to know.
"""

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


@triton.jit
def unknown(n):
    """An int32, of which the compiler does not know how large it is: a loop up to it is not unrolled as a
    whole."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.full([], n, tl.int32)], tl.int32, True, 1)
