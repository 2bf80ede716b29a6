"""The forward of v26, unchanged."""

from stages.v26_second_q.forward import forward

__all__ = ["forward"]
