"""Executors for a GPU, and the kernels that they run. Triton is imported when the first of its kernels runs.

Nothing in this folder has run on a GPU yet: `flex` was tested as it was traced, without compilation, and the kernels in
Triton's interpreter, and they compile for an H100. Their speed is unknown. So each must pass a trial, see `trial`.
"""
