"""The stages share these modules: descriptors, tiles, tuning, program order, Hopper's instructions, replayed launches."""
