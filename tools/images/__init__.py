"""The pictures of the pack and of its docs."""
