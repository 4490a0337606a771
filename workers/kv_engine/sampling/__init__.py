"""Logits to tokens: processors, filters, sampler, grammar masks, log probabilities."""
