"""The gateway: HTTP in, events out; it relays the workers' output to clients, without torch or a tokenizer.

app             the process: routes, middleware, shutdown
http/           the server below ASGI: socket, connections, time limits; request bodies
middleware/     ASGI middleware that every request passes before its route
requests/       a request from submission to the last byte of its answer, the same for all routes
generate/       `/generate` and `/warm`: M*'s form and JSON, NDJSON and one document
openai/         `/v1/*`: OpenAI's requests, answers and routes, tool calls and log probabilities
speech/         `/v1/audio/speech`: audio files and streams
operations/     health, metrics, version, status and cancel of requests
meters/         the gateway's own counters
errors          the mapping from errors to HTTP
openapi         `/openapi.json`
request_limits  the limits of a single request
served_model    the model that the deployment serves
client_key      the name of a request's API key
"""
