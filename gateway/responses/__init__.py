"""OpenAI's Responses API. Its state is the log: a response is a request, and its answer."""
