"""What is not the point of any stage: where kernels run, the operator, references, workloads, timing, tables."""

from common import runtime  # first: it chooses between GPU and interpreter, before any kernel is defined

__all__ = ["runtime"]
