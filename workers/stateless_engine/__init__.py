"""The stateless engine: nodes that remember nothing, fired in batches by a thread of their own.

scheduler.py   which node is next, and with which of its firings    pure
firing.py      what a firing is given, and what it came to          no torch
thread.py      the thread, and the event loop's side of it          no torch
nodes.py       the nodes on their device: bytes to tensors and back
"""
