"""Serving through Triton Inference Server: README.md beside this file tells how."""
