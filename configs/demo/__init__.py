"""The demo model: a very small chat model that knows what Python's builtins do.

`collect` froze the corpus, `conversations` makes talk of it, `train` makes the checkpoint, `evaluate`
measures it. A server needs none of them: it reads `checkpoint/`, as it would read any other.
"""
