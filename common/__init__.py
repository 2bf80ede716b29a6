"""The stages share the code in this package.

Each entry of this list imports only from later entries: site, show, measure, the stages, ring, kernels, operator, runtime,
interpreter.
"""

from common import runtime  # comes first, to choose GPU or interpreter before any kernel is defined

__all__ = ["runtime"]
