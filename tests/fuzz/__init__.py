"""Fuzz tests: requests, events, configurations and weight files, damaged at random.

`make test` runs some hundreds of examples, `make soak` many thousands (`FUZZ_EXAMPLES`). Damaged input is
answered with a clear error, or accepted as far as it is still valid. Nothing crashes or hangs, and a valid
request is answered afterwards as before.
"""
