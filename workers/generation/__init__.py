"""Text generation: sampled tokens become text and output chunks (detokenizer, stop strings, prompt echo)."""
