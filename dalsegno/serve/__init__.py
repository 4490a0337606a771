"""`dalsegno serve`: starts, supervises and stops the processes of a deployment."""
