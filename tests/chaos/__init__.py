"""Chaos: real processes are killed, stopped and cut off at every instrumented point while clients stream.

    deployment.py   starts the roles, each behind a proxy of its own, and starts again what died
    proxy.py        between a role and NATS: cuts, stalls, heals
    questions.py    what is asked, of all kinds a client may ask
    clients.py      ask, and resume at another gateway when a connection breaks; they note all they are told
    rawlog.py       the stream, read with the stock client
    ledger.py       what the server acked, noted on the wire
    checker.py      holds what clients were told against the stream; shares no code with what it checks
    liar.py         a proxy that falsifies answers, to prove that the checker notices
    rounds.py       one fault, under load, and what came of it
    matrix.py       every role, every point, every fault
    scenarios.py    what is no single point: a server away, two roles at once, a poison request
    report.py       the table

`make chaos` runs it all: `python -m tests.chaos`.
"""
