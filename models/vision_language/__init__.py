"""Kit of the vision-language families: chats with images and video, over transformers' own model classes.

    graph.py        the graph and the plan, which all these families share       imported by the conductor
    visuals.py      what a walk tells its nodes of the media in a prompt         imported by the conductor
    processing.py   the CPU node: messages and media -> token ids, pixels, parts
    chats.py        messages with parts, in the form that a chat template takes
    expansion.py    placeholders in a rendered chat -> the tokens of each medium
    images.py       adapters of images that several families share
    grids.py        media of any size as grids of patches: images, and the frames of videos
    frame_options.py  the request parameters of families that look at videos   imported by the conductor
    axes.py         the KV node of models whose tokens have positions on three axes
    halves.py       the two halves of a model class: language model and tower
    decoder.py      the KV node: the language model without its tower
    tower.py        the stateless node: pixels -> the rows that replace embeddings
    nodes.py        `nodes.load` of a family, made of its tower and its KV node

A family names its architectures in `graph.py`, makes pixels and placeholder texts in `processing.py`, and
calls its tower in `nodes.py`.
"""
