"""The demo model that sees: a very small LLaVA that names the colour and the shape in a picture.

`pictures` draws, `lessons` asks and answers, `train` makes the checkpoint, `evaluate` measures it. A server
needs none of these modules: it reads `checkpoint/` like any other checkpoint.
"""
