"""Triton and Gluon kernels, one a file. They import Triton at their top; only the backends that launch them import
them.
"""
