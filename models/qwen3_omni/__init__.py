"""Qwen3-Omni: text, images, videos and sound in, text and speech out, spoken while it is being written.

    prepare ── Thinker: text ── states ──> Talker and its code predictor ── codes ──> Code2Wav ── audio
       └── audio_encoder, vision_encoder ──> Thinker

`graph`, `processing` and `nodes` are the modules of a family (`models.base`).
"""
