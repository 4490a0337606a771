"""The CPU kernels: the layers of Llama-like decoders in C++, with torch in their place where they are not.

    numbers.h     vectors of floats, bfloat16, e to the x
    team.h        threads that share a step, and do over what one without a core began
    tiles.h       packed matrices, and products with them;  amx.h  by Intel's tile unit
    squeezed.h    weights of bfloat16 in three quarters of their memory
    attention.h   attention over the paged pool
    body.cpp      all layers in one call, and the C functions
    build.py      compiles them;  install.py  does so at installation;  library.py  loads them
    packing.py    packs a model's matrices
    decoder.py    a node of the engine that computes with them

Why this and not torch's: `docs/adr/0018-one-call-per-step.md`; why they are squeezed:
`docs/adr/0021-weights-of-twelve-bits.md`; how threads share a step:
`docs/adr/0023-nobody-waits-for-a-thread.md`.
"""
