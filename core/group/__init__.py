"""The resident rank group: one background process per device, and the client that speaks to them."""
