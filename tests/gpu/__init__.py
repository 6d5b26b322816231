"""Checks of weights that two processes share on one GPU. `python -m benchmarks.gpu` runs them where nothing but torch and
transformers is installed, and on a CPU they go through the same code over POSIX shared memory.
"""
