"""`dalsegno ask`: sends one question to a running server and prints the answer."""
