"""Whole models, compiled and compared with eager PyTorch: what they are, the rule they are held to, and the
driver."""
