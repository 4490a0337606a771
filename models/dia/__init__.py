"""Dia, text to speech: an encoder of bytes, a decoder whose nine codes of a frame are delayed, DAC's sound.

prepare ── encoder: bytes, and none ── decoder: program `speak`, two contexts ── codes ──> dac ── audio
"""
