"""Decoder-only language models out of transformers, as nodes of the KV-cache engine.

    architecture.py   what a checkpoint says of itself: the class, its config, the longest text, the dtype
    probe.py          what the model would ask of its attention: refused by name, or the shape of its KV
    tensors.py        its weights, through transformers' own renames and ties
    quantised.py      those stored in eight bits, as the floats they stand for
    sharding.py       the part of it that one of several members has
    node.py           the node: embed, forward, head
    loader.py         all of it in order: a folder in, a node out

Any family whose graph has such a model in it loads it from here, under the name its graph gives it.
"""
