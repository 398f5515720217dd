"""Executors for a CPU, and what they are made of."""
