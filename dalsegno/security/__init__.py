"""`dalsegno init-security`: keys, certificates and the NATS server's configuration."""
