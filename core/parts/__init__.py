"""The parts of a pipeline beside its transformer: text encoder, VAE and prompts."""
