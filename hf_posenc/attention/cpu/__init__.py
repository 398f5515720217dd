"""Executors for a CPU, and what they are made of.

`kernel` is torch's own, `fused` the executor of schemes that add a bias, and `biases` has the plain forms of a bias.
Each special form is a file of its own: `piecewise` and `products` for `fused`, and `locality`, an executor.
One stays where it brings a scheme at least 1.3 x at 2,048 tokens; docs/decisions.md has the figures.
"""
