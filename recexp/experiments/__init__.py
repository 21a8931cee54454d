"""Measuring, comparing, recording and drawing: what the notebooks call."""
