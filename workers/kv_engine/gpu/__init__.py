"""GPU execution: fused layers, CUDA graphs, streams, and steps launched ahead."""
