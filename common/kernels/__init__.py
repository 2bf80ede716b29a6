"""What stages are made of: descriptors, tiles, tuning, the order of programs, Hopper's instructions, repetition."""
