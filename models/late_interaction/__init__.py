"""Late interaction (ColBERT): a vector of each token of a text, and MaxSim scores of texts against queries.

graph        the walks, the options, the claim
folder       the settings of a folder, in the layouts of ColBERT, PyLate and sentence-transformers
processing   texts to token ids, with prefixes and the expansion of queries
nodes        the node with encoder and projection
"""
