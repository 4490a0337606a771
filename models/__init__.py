"""Model families, one package each (`graph`, `processing`, `nodes`), and the code that they share."""
