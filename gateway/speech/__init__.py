"""The text-to-speech route, and the audio files of its answers."""
