"""A family that draws in steps: `prepare` ── `denoiser` (a stepped node) ── `decoder` ── image."""
