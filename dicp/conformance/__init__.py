"""Operator conformance: PyTorch's operator database, and random graphs, against eager, on any backend.

`python -m dicp.conformance --vendor cpu_graph` runs it; docs/conformance.md says what is compared, and how.
"""
