"""Weights of few bits, whatever kernels multiply them: their choice, their error, their files."""
