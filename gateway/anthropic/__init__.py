"""Anthropic's Messages API, answered by the same chat machinery as OpenAI's (`gateway.openai`)."""
