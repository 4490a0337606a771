"""Chaos tests: real processes fail at instrumented points while clients stream.

    deployment.py   starts the roles, each behind its own proxy, and restarts what died
    proxy.py        between a role and NATS: cuts, stalls, heals
    questions.py    the requests, of every kind that a client may send
    clients.py      send requests, resume at another gateway after a disconnect, and record all they receive
    rawlog.py       the stream, read with the stock client
    ledger.py       the events that the server acked, noted on the wire
    checker.py      compares what clients received with the stream; shares no code with the code under test
    liar.py         a proxy that falsifies answers, to prove that the checker notices
    rounds.py       one fault under load, and its outcome
    matrix.py       every role, every point, every fault
    scenarios.py    faults beyond single points: a server away, two roles at once, a poison pill
    report.py       the table of results

`make chaos` runs all of it: `python -m tests.chaos`.
"""
