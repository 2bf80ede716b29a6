"""Measure and check the stages: workloads, a float64 reference, timers, counters, and reports of compiler and profiler."""
