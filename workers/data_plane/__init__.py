"""The data plane: tensors from worker to worker, outside the log (ADR 8).

port            the interface that the rest of a worker uses
store           the port over an arena and a list of transports; `open_store` makes one
device_store    tensors in GPU memory, read through CUDA IPC
step_tensors    the tensors of one step on this rank
scopes          the lifetime of slots: a scope is a path, and ends with everything below it
assembly        the transports that a configuration allows
arrays          tensors to bytes and back (torch)
memory/         arenas on the host and on the GPU
transports/     access to other workers' arenas, one module each

A handle says where a tensor was published. If the tensor is not there any more, the reader gets `TensorGone`,
and never another tensor's bytes.
"""
