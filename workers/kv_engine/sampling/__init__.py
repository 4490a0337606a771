"""Sampling: logits processors, filters, the sampler, grammar masks, log probabilities and pooling."""
