"""From sampled tokens to output chunks: detokenizing, stop strings, echoes."""
