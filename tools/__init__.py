"""What made the small model, pictures and pages. Not installed."""
