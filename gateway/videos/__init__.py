"""The video routes: OpenAI's jobs at `/v1/videos`, and `/v1/videos/generations`, which waits."""
