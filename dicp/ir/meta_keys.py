"""Keys of what dicp notes on nodes (`node.meta`) and on graphs (`gm.meta`)."""

LAYOUT_KEY = "dicp_layout"
"""Of a node: its dims from outermost to innermost in memory, where the layout pass chose the order."""

STRIDE_WAIVED = "dicp_any_stride"
"""Of a node: true where a layout pass has taken the strides out of the traced program's hands."""

ROUNDED = "dicp_rounded"
"""Of a node: the value is rounded to its dtype also where it is not written to memory."""

FROZEN = "dicp_frozen"
"""Of a placeholder: the name of the weight that it is."""

PACKED = "dicp_packed"
"""Of a placeholder: the form, where it is what the vendor made of a weight (`VendorBase.pack`)."""

FREE_OUTPUTS = "dicp_free_outputs"
"""Of a graph: indices of outputs whose strides the compiler may choose: the backward that reads them is
compiled for those, and autograd takes any."""

VIEWS_OF_INPUTS = "dicp_views_of_inputs"
"""Of a graph: indices of outputs that are views of inputs the graph writes, and share their memory."""
