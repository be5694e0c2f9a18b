"""Attention with column sums, and the compiled forms of what a pass computes."""
