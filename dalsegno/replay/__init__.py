"""`dalsegno replay`: repeats a recorded request's decisions and computations, and compares them."""
