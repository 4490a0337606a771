"""`python -m dalsegno`: the program that the launcher starts for each role."""

from dalsegno.cli import main

main(prog_name="dalsegno")
