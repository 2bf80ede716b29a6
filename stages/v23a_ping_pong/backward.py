"""The backward of v23, unchanged."""

from stages.v23_overlapped.backward import backward

__all__ = ["backward"]
