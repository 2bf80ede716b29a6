"""The backward of v4, unchanged."""

from stages.v4_autotune_descriptor.backward import backward

__all__ = ["backward"]
