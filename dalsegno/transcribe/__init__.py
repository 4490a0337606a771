"""`dalsegno transcribe`: write down what is said in a file."""
