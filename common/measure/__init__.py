"""Measure and count: workloads, a float64 reference, timers, counters, and reports of the compiler and the profiler."""
