"""The stateless engine: batched execution of nodes without state, in its own thread.

scheduler.py   the choice of the next node and its batch      pure
firing.py      firings and their results                      no torch
thread.py      the thread, and its interface to the loop      no torch
nodes.py       the nodes on their device; bytes and tensors
"""
