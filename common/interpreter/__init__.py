"""Run kernels on a CPU: repair Triton's interpreter, and interpret Gluon."""
