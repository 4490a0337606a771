"""Kit of speech to text: options, transcripts, the windows of long files, encoder-decoder models."""
