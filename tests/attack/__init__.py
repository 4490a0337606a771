"""Attacks on a running deployment: each promise is tested by an attempt to break it.

    __main__.py     runs the families, prints the table, sets the exit status
    promises.py     promises, verdicts, the table
    target.py       deployments under attack: with API keys, ranks, a NATS server of `init-security`
    bus.py          a NATS connection with a role's key, which records what was stored and what was denied
    guides.py       floods of guides and large inputs, beside another key's plain requests
    readers.py      a thousand readers, while the processes that need a reader themselves are killed
    forgery.py      events of every type, forged by every role; `forged_events.py` makes them
    tampering.py    changes of every field of every record, in bundles and in the log
    weights.py      other weights, tokenizers and templates between a kill and the restart
    origins.py      requests that a web page of another origin can make
    kills.py        processes killed at random times under every kind of request
    resources.py    slow, silent and oversized clients

The answers are judged by `tests.chaos.checker`, which shares no code with the product.
`make attack` runs all of it: `python -m tests.attack`.
"""
