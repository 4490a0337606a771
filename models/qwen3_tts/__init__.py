"""Qwen3-TTS with preset voices: a talker with a code predictor in each frame, and the codec's decoder.

prepare ── Talker: text ── codes, a frame at a time ──> Codec ── audio
"""
