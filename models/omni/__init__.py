"""Kit of the models that think and talk: Qwen3-Omni and Qwen2.5-Omni.

    prepare ── Thinker: text ── states ──> Talker ── codes ──> Code2Wav ── audio
       └── audio_encoder, vision_encoder ──> Thinker

A family brings its classes of transformers, the talker's prompt, its codec, and the tokens of its media.
"""
