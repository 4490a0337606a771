"""CSM, text to speech: a language model over frames of codes, whose inner loop predicts most of each frame.

prepare ── LLM and its depth decoder: text ── codes, a frame at a time ──> codec_decoder (Mimi) ── audio
"""
