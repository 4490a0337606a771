"""`dalsegno studio`: recorded requests in a web browser, from a process of its own."""
