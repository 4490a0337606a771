"""Ollama's API, answered by the same chat machinery as OpenAI's (`gateway.openai`)."""
