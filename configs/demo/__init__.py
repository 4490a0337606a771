"""The demo model: a very small chat model that describes Python's builtins.

`collect` made the corpus, `conversations` generates lessons from it, `train` makes the checkpoint, `evaluate`
measures it. A server needs none of these modules: it reads `checkpoint/` like any other checkpoint.
"""
