"""The data plane: tensors on their way from worker to worker, beside the log (ADR 8).

port.py          what the rest of a worker asks of it
arena.py         one pre-faulted piece of memory per worker, and its slots
store.py         the port over an arena and a list of transports
transports/      how another worker's bytes are reached, the cheapest first

No torch here: bytes, dtypes and shapes. A handle says where a tensor was last seen; what is not there any
more is `TensorGone`, and never another tensor's bytes.
"""
