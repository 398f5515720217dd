"""Executors for a GPU, and the kernels that they run. Triton is imported when the first of its kernels runs.

They have run on two GPUs, with a torch older than the supported ones: `benchmarks/results/README.md` says what was
right, what was not, and how fast they were. So each must pass a trial, see `trial`.
"""
