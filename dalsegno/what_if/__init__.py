"""`dalsegno what-if`: what another configuration would have decided, or how long requests would take."""
