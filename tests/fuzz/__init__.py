"""What nobody would send by intent: requests, events, configurations and weight files, damaged at random.

`make test` tries some hundreds, `make soak` many thousands (`FUZZ_EXAMPLES`). Whatever comes is
answered with a clear error or taken for what it still says; nothing crashes, nothing hangs, and a proper
request is answered afterwards as it was before.
"""
