"""Robot policies: openpi's policy-server protocol.

    packing.py    msgpack with arrays, as openpi's clients write and read it; no numpy is needed
    routes.py     GET /policy (what the server is), POST /policy (an observation -> actions)
    answers.py    the answer of POST /policy
    session.py    the WebSocket at `/`: its beginning is a GET, and each of its messages a POST

So observations over a WebSocket pass the same middleware as all requests: keys, origins, limits, metrics.
"""
