"""Device functions that emitted kernels call as `d.<name>`: one per primitive of ir/expr.py that Triton has
no infix operator for, what memory and run-time checks need, and the reductions and scans along the second
dim of a tile. emulate.py has the same for Triton's interpreter.
"""

from dicp.vendor.cuda_graph.device.arithmetic import *  # noqa: F403
from dicp.vendor.cuda_graph.device.atomics import *  # noqa: F403
from dicp.vendor.cuda_graph.device.checks import *  # noqa: F403
from dicp.vendor.cuda_graph.device.functions import *  # noqa: F403
from dicp.vendor.cuda_graph.device.idioms import *  # noqa: F403
from dicp.vendor.cuda_graph.device.launches import *  # noqa: F403
from dicp.vendor.cuda_graph.device.reductions import *  # noqa: F403
from dicp.vendor.cuda_graph.device.scans import *  # noqa: F403
from dicp.vendor.cuda_graph.device.storage import *  # noqa: F403
