"""Voxtral, speech to text: Whisper's encoder, and a Llama that is asked to transcribe."""
