"""Pi0.5: images, a robot's state and an instruction in, actions out: `graph`, `processing` and `nodes`."""
