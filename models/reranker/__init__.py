"""Rerankers: texts and a query in, a score of each text out.

folder       the settings of a checkpoint: its kind, activation, length and tokens
pairs        a query and a text as the tokens of a cross-encoder
judging      the same for a language model that answers yes or no: Qwen3-Reranker
templates    the same for a judge with a chat template of its own
token_types  the token types, which tell a query from a text, if the model is given them
scorers      the models: packed texts to scores
graph, processing, nodes    the family
"""
