"""Workers: one process per rank; each runs the nodes placed on it.

process            the process: joins, sends heartbeats, leaves
settings           `model_kwargs`, checked (pure)
membership/        a rank's incarnation on the log
orders/            the orders that this incarnation executes, each once (pure)
execution/         steps: walks over ranks, nodes, outputs
streams/           streams between the nodes of a request
generation/        the event loop's side of sequences: tokens to text and chunks
loading/           the model in memory, and its engines
kv_engine/         the engine of KV nodes, and its thread (torch)
stateless_engine/  the engine of stateless nodes, and its thread (torch)
tensor_parallel/   ranks that share one node
data_plane/        tensors from worker to worker
cpu_kernels/       layers on CPUs, in C++
machine/           memory, devices and threads of the machine
threads/           hand-over between threads

No torch on the event loop's side: the engines' threads import it while the process already sends heartbeats.
"""
