"""Executors for a GPU, and the kernels that they run. Triton is imported when the first of its kernels runs.

They have run on one GPU, an H200, with a torch older than the supported ones: `benchmarks/results/gpu.md` says what was
right and what was not. Nobody has measured their speed. So each must pass a trial, see `trial`.
"""
