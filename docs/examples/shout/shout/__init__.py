"""A model of its own for Dal Segno: it says in capitals what it is told, word by word."""
