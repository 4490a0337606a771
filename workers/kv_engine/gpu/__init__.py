"""GPU execution: fuse layers, CUDA graphs, streams, steps launched ahead."""
