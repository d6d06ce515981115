"""Plans before they are used: proposing one, comparing sharded with unsharded, and bounds of speed and memory."""
