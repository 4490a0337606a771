"""A family that thinks and talks: a Qwen3-Omni without media, whose talker is fed while its thinker writes.

prepare ── thinker: text ── states ──> talker and its code predictor ── codes ──> codec ── audio
"""
