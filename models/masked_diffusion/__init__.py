"""Masked diffusion language models: LLaDA, Dream, and dllm-hub's `...-diffusion-mdlm`.

options.py    the request parameters
remasking.py  the published rules: what is filled in, and in which order
recipe.py     the settings of an answer: its options, and the defaults of its model
llada.py      LLaDA's checkpoints as transformers' Llama
dream.py      Dream's as Qwen2
graph.py, processing.py, nodes.py    the family; the canvas is `models.diffusion_text.canvas`
"""
