"""LLaVA: a CLIP, SigLIP or Pixtral tower before a language model. `graph`, `processing` and `nodes`."""
