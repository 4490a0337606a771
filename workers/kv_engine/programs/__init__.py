"""Programs of KV nodes: several forward passes per node call, or per token, over contexts that share pages.

    spec.py       a call of a program, for the engine
    pages.py      the blocks of a program, shared by its contexts
    contexts.py   the contexts of a run: tokens, blocks, forks, copies on write
    checks.py     checks of the passes that drivers ask for
    passes.py     passes in a step: spans, positions, masks, embeddings, their results
    towers.py     companion models of the node: their pools and forwards
    runs.py       one run: its driver, its passes, its tensors
    tokens.py     sequences whose tokens come from a program: their request, their emissions
    engine.py     all runs of an engine: admission, packing, results

The contract of drivers is `models.programs`; the reasons are in docs/adr/0033-programs.md and
docs/adr/0037-token-programs.md.
"""
