"""CPU kernels in C++: the layers of Llama-like decoders. Without them torch computes the layers.

    numbers.h       vectors of floats, bfloat16, exponential
    team.h          threads that compute a step together, and redo pieces of a thread that lost its core
    tiles.h         packed matrices and their products;  amx.h  products by Intel's tile unit
    squeezed.h      bfloat16 weights in three quarters of their memory
    grouped.h       weights of four and eight bits
    experts.h       the tokens of a step by their experts
    attention.h     attention over the paged pool
    body.cpp        all layers in one call, and the C functions
    compilation.py  compiles the library;  install.py  does it at installation;  library.py  loads it
    packing.py      packs matrices;  layer_packing.py  layers;  quantisation.py  decides their forms
    decoder.py      the engine's node that computes with the kernels

Reasons: why not torch, `docs/adr/0018-one-call-per-step.md`; why the weights are squeezed,
`docs/adr/0021-weights-of-twelve-bits.md`; how threads share a step,
`docs/adr/0023-nobody-waits-for-a-thread.md`; weights of few bits, `docs/adr/0084-weights-of-few-bits.md`;
experts, `docs/adr/0085-experts-are-one-matrix.md`.
"""
