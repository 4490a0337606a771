"""Batches: files of requests that run at low priority, and whose answers become files (ADR 82).

request.py       the body of POST /v1/batches
routes.py        the routes
store.py         the batches on the log: one, a page of them, cancel
answers.py       OpenAI's batch object
state.py         the state of a batch, by its events
live.py          running batches, by the heartbeats of the gateways that run them
runner.py        the batches that this gateway runs
run.py           one running batch
slots.py         the number of lines that run at a time, and their priorities
lines.py         the lines of its file
line_request.py  a line as an HTTP request within this process
results.py       the results of lines, and of segments of lines
"""
