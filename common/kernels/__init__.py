"""Building blocks of the stages: descriptors, tiles, tuning, program order, Hopper's instructions, replayed launches."""
