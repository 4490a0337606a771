"""The machine under a worker: memory, devices, threads."""
