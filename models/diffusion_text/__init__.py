"""Kit of diffusion language models: graph, samplers, the canvas driver, adaptive parallel decoding."""
