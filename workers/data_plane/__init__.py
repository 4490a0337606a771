"""The data plane: tensors on their way from worker to worker, beside the log (ADR 8).

port.py          what the rest of a worker asks of it
store.py         the port over an arena and a list of transports; `open_store` makes one
scopes.py        whose a slot is, and what the end of a scope ends
arena.py         one pre-faulted piece of memory per worker, and its slots: over blocks.py (which pages are
                 free), chunks.py (which are ready), backing.py (the file), layout.py (what is where in it)
reader.py        another process's arena, mapped
transports/      how another worker's bytes are reached, the cheapest first

No torch here: bytes, dtypes and shapes. A handle says where a tensor was last seen; what is not there any
more is `TensorGone`, and never another tensor's bytes.
"""
