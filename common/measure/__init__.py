"""Measuring and counting: workloads, the truth in float64, timers, counters, the compiler's and the profiler's reports."""
