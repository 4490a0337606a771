"""Several texts in one request: `/v1/embeddings`, `/v1/rerank`, `/v1/score`."""
