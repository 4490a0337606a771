"""The KV-cache engine: continuous batching over a paged pool, one forward per step.

sequence.py     what is asked for, and how far it is                          no torch
blocks.py       which blocks of the pool are whose                            no torch
prefix_cache.py which blocks hold the beginnings of texts                     no torch
scheduler.py    who takes part in the next step                               no torch
pace.py         how much of a prompt is computed beside answers               no torch
ahead.py        who is in the step behind one that is not read yet             no torch
kv_engine.py    schedule, run, tell: the step itself
runner.py       forwards, launched and read
step.py         the step as fixed tensors
node.py         what the engine asks of a model
selfcheck.py    the proof, at load, that pool and stock model agree
kv_transfer.py  keys and values out of the pool, and in
cpu_threads.py  how many threads there are on a CPU
outcomes.py     counters, and steps that failed                               no torch
mailbox.py      the bounded queue between two threads                         no torch
thread.py       the thread that owns engine and device                        no torch

From hidden states to what is asked for:

adjust.py       biases, penalties and masks, before a token is chosen
ledger.py       what each row says of its tokens, on the device
guide.py        which tokens a guided sequence may choose, told while the forward runs
sampler.py      logits to tokens, by counted randomness
filters.py      top-k, top-p and min-p, as one threshold
logprobs.py     logits to log probabilities, for rows that ask
pooling.py      hidden states to one vector, or all of them, for prompts that are not answered
speculate.py    tokens that are guessed, and how many of them                 no torch
draft.py        a smaller model that guesses

Attention, and what computes the layers on a GPU:

attention.py    the one attention function of all models, over the pool
pages.py        a pool's memory, taken while nobody asks
llama_like.py   which models our own kernels know                             no torch
gpu_kernels.py  whether a GPU's are there; those of CPUs are `workers.cpu_kernels`
triton_attention.py, triton_layers.py   the kernels
flashinfer_attention.py   attention by FlashInfer, where it is asked for
gpu_decoder.py  a node that is computed by them
graphs.py       steps that are recorded on a GPU, and replayed
gpu_streams.py  which stream of a GPU a thread launches on

A node that several ranks share:

meeting.py      where they meet                                               no torch
line.py         the connection between leader and follower                    no torch
lockstep.py     what the leader says of each step
follower.py     the engine that follows
comm.py         sums over all members
"""
