"""What is not the point of any stage, in rooms; imports run one way: show, measure, the stages, kernels, operator, runtime."""

from common import runtime  # first: it chooses between GPU and interpreter, before any kernel is defined

__all__ = ["runtime"]
