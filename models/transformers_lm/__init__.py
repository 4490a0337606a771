"""Decoder-only language models of transformers, as nodes of the KV engine.

    architecture.py   the model class, its config, the longest sequence and the dtype of a checkpoint
    probe.py          checks of the model's attention: the KV layout, or why the model is not served
    tensors.py        loading of weights, with transformers' renames, merges and ties
    quantised.py      8-bit weights, loaded as floats
    sharding.py       tensor parallelism: the part of a model that one rank has
    node.py           the node: embed, forward, head
    loader.py         from a checkpoint folder to a node

Any family with such a model in its graph loads it from here, under the name of its node.
"""
