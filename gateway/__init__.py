"""The gateway: HTTP in, events out; relays outputs. It knows neither torch nor a tokenizer.

app           the composition: routes, middleware, process
server        the socket, uvicorn, and how it ends
connection    one connection, and an end to all that a client can leave unfinished
doors/        what every request passes before its route
service       what the routes share: is the log there, who is working, how many streams run
submission    a request becomes an event, or attaches to the one that is there
audience      who reads it here and elsewhere; when nobody does any more it is cancelled
choices       one question that asks for several answers, and their answers merged
relay         the log's records become each request's answer, every chunk once
answer        an answer becomes an HTTP response; a client that leaves cancels
resume        a client that lost its connection goes on behind what it has
caps          what one request may ask for
requests      how a request stands, and an end to it, by the log
passed        which requests there were, when the log has forgotten them
health        what the beats tell
bodies        request bodies: what JSON is, and the parameters both APIs share
errors        the one table from errors to HTTP
schema        `/openapi.json`, with our errors
generate/     `/generate`: M*'s form and JSON, NDJSON and one document
openai/       `/v1/*`: OpenAI's requests, answers and routes, calls of tools in them
metrics/      what is counted, and `/metrics`
"""
