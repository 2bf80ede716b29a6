"""Kernels on a CPU: Triton's interpreter, and what it needs to compute as a GPU does."""
