"""The ranks: one background process per device, and the client that speaks to them. Knows no model."""
