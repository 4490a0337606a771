"""An example of a model family: it repeats a text in capitals, word by word."""
