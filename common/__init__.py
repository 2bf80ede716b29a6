"""The stages share the code in this package.

The parts are, in this order: site, show, measure, the stages, kernels, operator, runtime. Each part imports only from parts
after it.
"""

from common import runtime  # the first import, because it chooses GPU or interpreter before any kernel is defined

__all__ = ["runtime"]
