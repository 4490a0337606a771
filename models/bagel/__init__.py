"""BAGEL: one language model that reads and writes texts and images, by two sets of weights.

a text            prepare ── prefill_text, prefill_vit or prefill_vae: encoders, LLM ── decode: LLM
an image          prepare ── image_gen: encoders ── LLM (the program `flow`) ── vae_decoder ── encode_image
on three ranks    prepare ── image_gen_cfg: the same with a loop over LLM, LLM_cfg_text, LLM_cfg_img
"""
