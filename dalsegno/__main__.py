"""`python -m dalsegno`: what the launcher starts each role with."""

from dalsegno.cli import main

main(prog_name="dalsegno")
