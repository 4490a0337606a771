"""Streams between concurrent walks: producers, consumers, credits."""
