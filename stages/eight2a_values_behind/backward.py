"""The backward of v26, unchanged."""

from stages.v26_second_q.backward import backward

__all__ = ["backward"]
