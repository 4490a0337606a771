"""The KV engine: continuous batching over a paged pool of keys and values, one forward per step.

Modules marked with * import no torch. From the request to its outputs:

sequence_spec.py *   the request: token ids and options, their validation
sequence.py *        live sequences, and the spans of a step
scheduler.py *       admission, preemption, the spans of the next step
prefill_budget.py *  prompt tokens per step next to decodes
step.py              the step as tensors in fixed buffers
runner.py            execution: launch a forward, read its tokens
step_outputs.py      sampled tokens and scores become outputs
outputs.py *         tokens, prompt scores, embeddings; failed steps
counters.py *        counters and statistics
engine.py            the engine: the step loop over all of these
config.py *          its sizes and policies
thread.py *          the thread that owns the engine and its device

The model and its keys and values:

node.py              the contract of a model: backbone and language head
selfcheck.py         check at load: pool and stock model give the same logits
kernel_models.py     the models that our own kernels support
kv_transfer.py       import and export of keys and values
cache/               blocks, the prefix cache, prefault of memory pages
attention/           attention over the pool, and its kernels
guide_state.py *     tokens that a sequence's guide allows next
sampling/            logits to tokens: penalties, grammar masks, filters, logprobs; pooling
speculative/         drafts by prompt lookup or a smaller model, and their verification
gpu/                 fused layers, CUDA graphs, streams, steps launched ahead
programs/            several forward passes per node call, or for the tokens of a sequence
parallel/            tensor parallelism: leader, followers, all-reduce
"""
