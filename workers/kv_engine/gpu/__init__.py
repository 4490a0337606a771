"""GPU execution: fused layers, CUDA graphs, streams, steps launched ahead."""
