"""Sound: the route that speaks, and the files its answers come in.

encoder.py    PCM in, a file's bytes out, piece by piece
request.py    `POST /v1/audio/speech`, parsed
answers.py    a spoken answer as bytes, or as server-sent events
routes.py     the route
"""
