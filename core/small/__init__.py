"""The small FLUX.2 that the demo and the tests paint with; `weights` is its pipeline folder."""
