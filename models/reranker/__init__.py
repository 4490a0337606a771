"""Rerankers: texts and a query in, a score of each text out.

folder       the settings of a checkpoint: its kind, activation, length and tokens
pairs        a query and a text as the tokens of a cross-encoder
judging      the same for a language model that answers yes or no: Qwen3-Reranker
templates    the same for a judge with a chat template of its own
token_types  whether the model is told which tokens are the query's
scorers      the models: packed texts to scores
graph, processing, nodes    the family
"""
