"""How octavo-tiny, the model that ships with octavo, is made. Run from a checkout; nothing here is installed."""
