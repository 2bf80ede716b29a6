"""Kernels on a CPU: repairs to Triton's interpreter, and an interpreter for Gluon."""
