"""The media store: the bytes of images, audio and video of requests, under their digests (ADR 30)."""
