"""Decoding of images, video and audio to arrays, within limits; pure functions of bytes. No torch."""
