"""Programs of KV nodes: several forward passes per node call, over contexts that share pages.

    spec.py       a call of a program, for the engine
    pages.py      the blocks of a program, shared by its contexts
    contexts.py   the contexts of a run: tokens, blocks, forks, copies on write
    passes.py     passes in a step: spans, positions, masks, embeddings
    engine.py     all runs of an engine: admission, packing, results

The contract of drivers is `models.programs`; the reasons are in docs/adr/0033-programs.md.
"""
