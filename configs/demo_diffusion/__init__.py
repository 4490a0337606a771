"""A demo that writes its answers in any order: a masked diffusion model of 1.7 MB, trained by `train`.

It is the demo's chat model (`configs.demo`) that was trained further to fill in masks, with attention in both
directions. A server needs only the checkpoint folder.
"""
