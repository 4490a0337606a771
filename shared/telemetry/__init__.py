"""Traces, timelines, histograms and structured log fields of a process."""
