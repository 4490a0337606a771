"""The KV-cache engine: continuous batching over a paged pool, one forward per step.

sequence.py    what is asked for, and how far it is          no torch
blocks.py      which blocks of the pool are whose            no torch
scheduler.py   who takes part in the next step               no torch
step.py        the step as fixed tensors
attention.py   the one attention function of all models
sampler.py     logits to tokens, by counted randomness
logprobs.py    logits to log probabilities, for rows that ask
pooling.py     hidden states to one vector, for prompts that are embedded
node.py        what the engine asks of a model
kv_transfer.py keys and values out of the pool, and in
kv_engine.py   schedule, run, sample: the step itself
selfcheck.py   the proof, at load, that pool and stock model agree
cpu_threads.py how many threads torch gets on a CPU
outcomes.py    counters, and steps that failed               no torch
mailbox.py     the bounded queue between two threads          no torch
thread.py      the thread that owns engine and device        no torch
"""
