"""Text encoders: texts in, an embedding of each out. `graph`, `processing` and `nodes`.

packed      the kit: the states of the tokens of many texts, computed without padding
attention   attention within each of several packed texts
prepacked   matrices in the layout that CPUs compute with
backbone    the class of a checkpoint without heads, and its weights
folder      the files of sentence-transformers: modules, prompts, lengths
head        the modules after the model: pooling, dense layers, normalization
items       the items of nodes that pack texts: their cost, their division into texts
mpnet       the attention of MPNet over packed texts
requests    the plan of requests of texts, their reading, and what is refused
tokens      texts to token ids, cut to a length
"""
