"""Streams of tensors between concurrent walks: producers, consumers, and credits for flow control."""
