"""Executors for a GPU, and the kernels that they run. Triton is imported when the first of its kernels runs."""
