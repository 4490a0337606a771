"""Qwen2.5-Omni: text, images, videos and sound in, text and speech out, spoken while it is being written.

`graph`, `processing` and `nodes` are the modules of a family (`models.base`); see `models.omni`.
"""
