"""The stages share the code in this package.

Each part imports only from later parts of this list: site, show, measure, the stages, ring, kernels, operator, runtime,
interpreter.
"""

from common import runtime  # the first import, because it chooses GPU or interpreter before any kernel is defined

__all__ = ["runtime"]
