"""`dalsegno chat`: a conversation with a running server, in the terminal."""
