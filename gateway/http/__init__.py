"""HTTP below the routes: the socket, uvicorn's connection, its parser, request bodies."""
