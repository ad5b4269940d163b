"""Runs octavo on other serving platforms, which import these modules. Each file needs the extra of its platform."""
