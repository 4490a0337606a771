"""V-JEPA 2-AC: a video and a robot's actions in, latents of the following frames out."""
