"""Higgs Audio v2, text to speech: a language model with a second set of weights for sound, and its codec.

prepare ── token ids ──> LLM: program `speak`, one context ── codes, a chunk at a time ──> codec ── audio
"""
