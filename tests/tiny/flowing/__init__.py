"""A family that draws: text as a decoder-only language model, and pictures by a program of its KV node.

a text that begins with "paint"    prepare ── paint: llm (the program `flow`) ── decoder ── image
any other text                     as `models.decoder_lm` answers it
"""
