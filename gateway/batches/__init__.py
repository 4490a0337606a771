"""Batches: files of requests that run at low priority, and whose answers become files (ADR 82).

request.py       the body of POST /v1/batches
routes.py        the routes
store.py         the batches on the log: one, a page of them, cancel
answers.py       OpenAI's batch object
state.py         the state of a batch, by its events
live.py          what a gateway knows of running batches beside the log
runner.py        which batches this gateway runs
run.py           one running batch
lines.py         the lines of its file
line_request.py  a line as an HTTP request within this process
results.py       the results of lines, and of segments of lines
"""
