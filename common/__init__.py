"""Code that the stages share. Imports go one way: show, measure, the stages, kernels, operator, runtime."""

from common import runtime  # first: it chooses GPU or interpreter before any kernel is defined

__all__ = ["runtime"]
