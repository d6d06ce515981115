"""What the ranks do with a model: load, forward, sample, patch, encode, decode. Both sides of every call."""
