"""Programs that make pages of the documentation. Run from a checkout; nothing here is installed."""
