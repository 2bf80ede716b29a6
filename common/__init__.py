"""Code that the stages share. Each of these imports only from those after it: show, measure, the stages, kernels, operator,
runtime."""

from common import runtime  # must be the first import: it chooses GPU or interpreter before any kernel is defined

__all__ = ["runtime"]
