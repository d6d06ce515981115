"""How the small FLUX.2 of the demo and the tests was made, and how its pictures are judged."""
