"""The demo model that draws: a very small Z-Image pipeline, for one coloured shape on a plain background.

`scenes` draws and describes, `train` makes the pipeline, `evaluate` measures it. A server needs none of these
modules: it reads `checkpoint/` like any other folder with a `model_index.json`.
"""
