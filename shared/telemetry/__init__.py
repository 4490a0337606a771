"""Traces, timelines, histograms and structured log fields."""
