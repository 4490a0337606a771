"""`/v1/*`: OpenAI's requests, answers and routes."""
