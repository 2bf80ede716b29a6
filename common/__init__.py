"""The stages share the code in this package.

Each entry of this list imports only from later entries: site, show, measure, the stages, ring, kernels, operator, entry,
recording, launching, layout, runtime, interpreter.
"""
