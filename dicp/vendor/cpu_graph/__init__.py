"""cpu_graph: the vendor that emits C++ for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx as fx

from dicp.vendor.base import Claim


class CpuGraph:
    """See dicp.vendor.base.Vendor."""

    name = "cpu_graph"
    device = "cpu"

    def available(self, config: Any) -> str | None:
        return None

    def supports(self, target: Any, node: fx.Node) -> bool:
        from dicp.vendor.cpu_graph.claims import supports

        return supports(target, node)

    def keeps(self, op: Any) -> bool:
        from dicp.vendor.cpu_graph.claims import keeps

        return keeps(op)

    def claim(self, node: fx.Node) -> Claim | None:
        from dicp.vendor.cpu_graph.claims import claim_for

        return claim_for(node)

    def fingerprint(self) -> str:
        from dicp.vendor.cpu_graph.claims import cpu_maker
        from dicp.vendor.cpu_graph.toolchain import environment_parts

        return repr(sorted(environment_parts().items())) + cpu_maker()

    def assemble(self, program: Any, config: Any) -> Callable[[list[Any]], Any]:
        from dicp.vendor.cpu_graph.assemble import assemble

        return assemble(program, config)


vendor = CpuGraph()
