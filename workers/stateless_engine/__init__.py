"""The stateless engine: batched execution of nodes without a KV cache, in its own thread.

scheduler.py     the choice of the next node and its batch      pure
step_order.py    the choice of the next calls of stepped runs   pure
batch_gain.py    the batch sizes that pay, as measured          pure
firing.py        firings, their reports and results             no torch
stepped_runs.py  the runs of stepped nodes                      no torch
thread.py        the thread, and its interface to the loop      no torch
results.py       bytes to tensors, and back
stepper.py       stepped nodes on their device
nodes.py         all nodes on their device
"""
