"""The small FLUX.2 that the demo and the tests paint with: how it is drawn, trained, judged and put together."""
