"""Kit of speech to text: options, the transcript of a window, the mel features and windows of long files."""
