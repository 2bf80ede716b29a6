"""The stages' kernels share this code. Where kernels are interpreted, the first launch prepares the interpreters."""

from common.runtime import INTERPRETED

if INTERPRETED:
    from common.kernels.interpreted import install_at_first_launch

    install_at_first_launch()
